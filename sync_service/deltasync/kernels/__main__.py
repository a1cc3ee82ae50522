"""`python -m deltasync.kernels`: compile all kernels, for example while building an image."""

from deltasync.kernels.compiled import warm

if __name__ == "__main__":
    warm()
