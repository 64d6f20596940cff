"""Trains MNIST on two pods of the current context of kubectl, such as one of kind or k3s.

TFDIST_K8S_IMAGE names an image with TensorFlow, and Python of the same release as this one, that
the nodes have or may pull; TFDIST_K8S_PYTHON its Python, if that is not python3. Everything that
this makes in the cluster is named tfdist-..., and gone in the end; what is left is an error.
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
        sys.exit(f"left in the cluster: {', '.join(left)}")


if __name__ == "__main__":
    main()
