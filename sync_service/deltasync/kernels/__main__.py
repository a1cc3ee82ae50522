"""`python -m deltasync.kernels`: compile all kernels now, say, when an image is built."""

from deltasync.kernels.compiled import warm

if __name__ == "__main__":
    warm()
