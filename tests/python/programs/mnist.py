"""Train on MNIST in processes that join, as a user would, and write the model."""

import json
import os
import sys

import pybackend


def main(folder, arguments, addresses=None, index=0):
    if addresses:
        pybackend.join(addresses, index)
    result = pybackend.train_mnist(None, **arguments)
    result.save(os.path.join(folder, f"{os.environ.get('RANK', index)}.h5"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
