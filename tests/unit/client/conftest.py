from tests.support.shared_memory import folder

__all__ = ["folder"]
