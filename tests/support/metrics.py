"""The metrics that /metrics exposes."""

from prometheus_client.parser import text_string_to_metric_families
from tests.support.http import HttpStatus

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

_CONSUMER, _TABLE, _REPLICA = {"consumer"}, {"consumer", "table"}, {"consumer", "replica"}

# What only consumers with a policy have.
POLICY_METRICS: dict[str, set[str]] = {
    "deltasync_consumer_unsent_norm": _CONSUMER,
    "deltasync_consumer_unsent_share": _CONSUMER,
    "deltasync_consumer_oldest_row_seconds": _CONSUMER,
    "deltasync_consumer_release": _CONSUMER,
    "deltasync_consumer_release_rows": _CONSUMER,
    "deltasync_consumer_release_bytes": _CONSUMER,
    "deltasync_consumer_left_rows": _CONSUMER,
    "deltasync_consumer_left_bytes": _CONSUMER,
    "deltasync_consumer_release_norm": _CONSUMER,
    "deltasync_consumer_left_norm": _CONSUMER,
    "deltasync_consumer_table_unsent_share": _TABLE,
    "deltasync_replica_unsent_norm": _REPLICA,
    "deltasync_consumer_table_unsent_norm": _TABLE,
    "deltasync_consumer_table_oldest_row_seconds": _TABLE,
}

# Those that exist only where a trainer says the times of its events.
EVENT_METRICS: dict[str, set[str]] = {
    "deltasync_head_event_time_seconds": {"model"},
    "deltasync_consumer_seconds_behind_events": _CONSUMER,
    "deltasync_replica_seconds_behind_events": _REPLICA,
}

# Those that exist only where TLS is spoken.
TLS_METRICS: dict[str, set[str]] = {"deltasync_certificate_expires_seconds": {"setting"}}

# Those that exist only where there is a checkpoint or a copy of one, and where the service probes itself.
CHECKPOINT_METRICS: dict[str, set[str]] = {
    "deltasync_checkpoint_copied_version": {"model"},
    "deltasync_checkpoint_age_seconds": {"model"},
    "deltasync_probe_seconds": set(),
    "deltasync_probe_age_seconds": set(),
    "deltasync_probe_failures_total": set(),
}

# Those that come a moment after a model does.
LATER_METRICS: dict[str, set[str]] = {"deltasync_model_kept_versions": {"model"}}

# What histograms consist of, and the labels that they have besides.
_SAMPLES: dict[str, set[str]] = {"bucket": {"le"}, "sum": set(), "count": set()}

# Each metric and its labels: what dashboards and alerts are built on.
METRICS: dict[str, set[str]] = {
    "deltasync_head_version": {"model"},
    "deltasync_build_info": {"version", "commit"},
    **{f"deltasync_cut_seconds_{end}": {"model", "part", *bound} for end, bound in _SAMPLES.items()},
    **{f"deltasync_delivery_seconds_{end}": {"consumer", "part", *bound} for end, bound in _SAMPLES.items()},
    **{f"deltasync_freshness_seconds_{end}": {"consumer", *bound} for end, bound in _SAMPLES.items()},
    "deltasync_consumer_lag_versions": _CONSUMER,
    "deltasync_consumer_lag_rows": _CONSUMER,
    "deltasync_consumer_lag_bytes": _CONSUMER,
    "deltasync_consumer_lag_seconds": _CONSUMER,
    "deltasync_consumer_state": {"consumer", "state"},
    "deltasync_consumer_replicas": {"consumer", "state"},
    "deltasync_consumer_damaged_tables": _CONSUMER,
    "deltasync_consumer_unbound_tables": _CONSUMER,
    "deltasync_consumer_damages_total": _CONSUMER,
    "deltasync_consumer_rewinds_total": _CONSUMER,
    "deltasync_consumer_table_lag_rows": _TABLE,
    "deltasync_consumer_table_lag_bytes": _TABLE,
    "deltasync_replica_checked": _REPLICA,
    "deltasync_replica_lag_versions": _REPLICA,
    "deltasync_replica_lag_rows": _REPLICA,
    "deltasync_replica_lag_bytes": _REPLICA,
    "deltasync_replica_lag_seconds": _REPLICA,
    "deltasync_published_rows_total": {"model"},
    "deltasync_published_bytes_total": {"model"},
    "deltasync_released_rows_total": _CONSUMER,
    "deltasync_released_bytes_total": _CONSUMER,
    "deltasync_table_rows": {"model", "table"},
    "deltasync_table_bytes": {"model", "table"},
    "deltasync_publishing_ranks": {"model", "state"},
    "deltasync_log_bytes": set(),
    "deltasync_log_risks": set(),
    "deltasync_lease_confirmed": set(),
    "deltasync_processes_alive": set(),
    "deltasync_models_without_owner": set(),
    "deltasync_checkpoint_failures_total": set(),
    "deltasync_log_bytes_since_checkpoint": {"model"},
    "deltasync_log_commit_seconds_bucket": {"le"},
    "deltasync_log_commit_seconds_count": set(),
    "deltasync_log_commit_seconds_sum": set(),
    "deltasync_volume_failed": {"volume"},
    "deltasync_volume_free_bytes": {"volume"},
    "deltasync_model_failed": {"model"},
    "deltasync_consumer_failed": _CONSUMER,
    "deltasync_consumer_paused": _CONSUMER,
    "deltasync_consumer_follows_seconds": _CONSUMER,
    "deltasync_events_total": {"event"},
    "deltasync_certificate_expires_seconds": {"setting"},
    "deltasync_limit": {"limit"},
    "deltasync_limit_taken": {"limit"},
    "deltasync_limit_refused_total": {"limit"},
    **EVENT_METRICS,
    **TLS_METRICS,
    **CHECKPOINT_METRICS,
    **LATER_METRICS,
    **POLICY_METRICS,
}


def _of_process(name: str) -> bool:
    """Whether a metric is one of those that Prometheus clients expose for every process."""
    return name.startswith("process_")


def samples_of(service: HttpStatus) -> Samples:
    """All samples by name and labels. Checks that each metric is listed above and has a help text."""
    _, text = service.get("/metrics")
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples if not _of_process(sample.name)]
    assert {sample.name: set(sample.labels) for sample in samples}.items() <= METRICS.items()
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
