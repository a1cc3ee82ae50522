"""The tables of a kept version, loaded for a release."""

from deltasync.base.errors import InvalidInput
from deltasync.checkpoints.manifest import TableKey
from deltasync.core.policy import Policy
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import spec_of_record
from deltasync.model.applied_tables import MODEL_OWNER, key_of
from deltasync.model.model import Model


def load_kept(
    model: Model,
    id: str,  # noqa: A002
    policy: Policy,
    *,
    replaying: bool = False,
) -> dict[TableKey, StampedTable]:
    """Load the tables of a kept version that a policy selects, as large as the model's are now. Blocks; any thread
    may call it. A replay leaves out tables that the model no longer has.

    Raises:
        InvalidInput: the version has a table that the model no longer has, or that does not fit the policy.
        StorageFailed: the checkpoint is missing, damaged, or cannot be read at present; or there is no room.
    """
    manifest = model.checkpoints.manifest_of(id)
    present = {key_of(table): table for table in model.tables}
    loaded = dict[TableKey, StampedTable]()
    for entry in manifest.tables:
        if entry.key.owner != MODEL_OWNER or not policy.follows(spec_of_record(entry.record)):
            continue
        if (table := present.get(entry.key)) is None:
            if replaying:
                continue
            raise InvalidInput(
                f"version {manifest.version} of model {model.name!r} has table {entry.key.name!r} from before it "
                "was deleted, and nothing can go back beyond that: use a later version"
            )
        policy.form_of(table.spec).check()
        loaded[entry.key] = StampedTable(table.spec, model.memory, table.removed_before)
    model.checkpoints.load(manifest, [loaded.get(entry.key) for entry in manifest.tables], note_use=False)
    return loaded
