"""Consumers with a policy: the rows that their replicas hold, and the releases that update these. Internal.

The modules, in the order in which a release passes through them:

    registry       the views of all consumers
    view           the feed of a consumer's replicas, and the loop that makes its releases when they are due
    decision       when a release is due and which rows it takes, and why
    release_maker  making one release: compare, choose and update rows, write the log, publish
    table          one table of a view: the rows that replicas hold, and its dirty rows, sorted by id
    log            the state of a view, its records in the log, and the history of its releases
    replay         rebuilding a view after a restart

A view is derived: its rows are the model's rows at the versions that its releases name. The log has the row ids of
each release, but no values. A replay repeats each release at its version, and ends with the same bits.

Threads. Separate threads wait for the disk, so that cuts continue meanwhile.

    the model's thread    rows, stamps and dirty sets of each `ViewTable`: `ReleaseBuild`, `Replay`, freezing
    the event loop        `View`, `ReleaseLoop`, `ReleaseMaker`, one call at a time
    any thread            `ViewState`, which is replaced and never changed; `ViewLog`
"""
