"""Train MNIST on two pods in the current context of kubectl, for example of kind or k3s.

TFDIST_K8S_IMAGE names an image with TensorFlow and the same release of Python as here, which the
nodes have or can pull. TFDIST_K8S_PYTHON names its Python; default: python3. All objects that this
creates in the cluster are named tfdist-... and deleted at the end; it fails if any remain.
"""

import os
import subprocess
import sys

import pybackend


def main() -> None:
    image = os.environ.get("TFDIST_K8S_IMAGE")
    if not image:
        sys.exit("TFDIST_K8S_IMAGE must name an image with TensorFlow")
    python = os.environ.get("TFDIST_K8S_PYTHON")
    cluster = pybackend.kubernetes(image, cpus=1, memory="2Gi", python=python)
    result = pybackend.train_mnist(cluster, workers=2, epochs=1)
    print(result)
    listed = ["kubectl", "get", "jobs,pods,services", "-l", "tfdist.io/run", "-o", "name"]
    left = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    if left:
        sys.exit(f"not deleted from the cluster: {', '.join(left)}")


if __name__ == "__main__":
    main()
