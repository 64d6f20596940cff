"""Load the classes that Spark's JVMs need; Java archives them when it exits (see the Makefile)."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession


def _same(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


session = SparkSession.builder.master("local[2]").getOrCreate()
session.sparkContext.setLogLevel("ERROR")
rows = session.createDataFrame([(number, str(number)) for number in range(9)], "a int, b string")
rows.createOrReplaceTempView("rows")
assert session.sql("select b, sum(a) from rows group by b").repartition(2).count() == 9
assert rows.mapInArrow(_same, "a int, b string", barrier=True).toPandas().shape == (9, 2)
session.stop()
