"""Print the pyspark versions of the driver and of the executors; exit with 1 if they differ."""

import pyspark
from pyspark.sql import SparkSession


def of_executor(_: object) -> list[str]:
    import pyspark

    return [pyspark.__version__]


builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
session = builder.getOrCreate()
there = session.sparkContext.parallelize([0, 1], 2).mapPartitions(of_executor).collect()
session.stop()
print(f"pyspark: driver {pyspark.__version__}, executors {', '.join(there)}")
if set(there) != {pyspark.__version__}:
    raise SystemExit(1)
