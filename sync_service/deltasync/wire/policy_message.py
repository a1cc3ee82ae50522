"""Between the wire's policy and ours."""

from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.v1 import admin_pb2
from deltasync.wire.codec import mode_from_message, mode_to_message, value_type_from_message, value_type_to_message


def policy_from_message(message: admin_pb2.Policy) -> Policy:
    """The policy a message describes.

    Raises:
        InvalidInput: a field is out of bounds, or fields that cannot be met together.
    """
    return Policy(
        tables=tuple(message.tables) or ("*",),
        mode=mode_from_message(message.mode),
        top_k=message.top_k or None,
        top_k_per_table=message.top_k_per_table,
        max_age_seconds=message.max_age_seconds or None,
        min_interval_seconds=message.min_interval_seconds,
        max_bytes=message.max_bytes or None,
        value_type=value_type_from_message(message.value_type) or ValueType.FP32,
    )


def policy_to_message(policy: Policy) -> admin_pb2.Policy:
    """The message that describes a policy."""
    return admin_pb2.Policy(
        tables=policy.tables,
        mode=mode_to_message(policy.mode),
        top_k=policy.top_k or 0.0,
        top_k_per_table=policy.top_k_per_table,
        max_age_seconds=policy.max_age_seconds or 0.0,
        min_interval_seconds=policy.min_interval_seconds,
        max_bytes=policy.max_bytes or 0,
        value_type=value_type_to_message(policy.value_type),
    )
