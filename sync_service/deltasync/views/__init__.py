"""Consumers with a policy: what replicas hold, and the releases that bring them nearer to the model. Internal.

In the order in which a release goes through them:

    registry       the views of a model's consumers, and the loop of each that makes releases as they become due
    pacing         when a release is due, and why
    view           what replicas are given; the view as checkpoints and recovery see it
    release_maker  one release: made, written to the log, shown
    making         what it does on the model's thread: copy, compare, take
    table          one table of a view: what replicas hold of it, and its dirty rows, sorted by id
    picking        which dirty rows a release takes
    state          where a view is at one moment
    log            its records in the log, and the history of its releases
    replay         a view made again, after a restart

A view is derived: its rows are those of the model at the versions that its releases name. The log has which rows
each release took, and no values. A replay does at each version what was done then, and ends with the same bits.

Threads. What waits for a disk waits in a thread that does nothing else, so that cuts are applied meanwhile.

    the model's thread    rows, stamps and dirty sets of `ViewTable`s: `Making`, `Replay`, freezing
    the event loop        `View`, `ReleaseLoop`, `ReleaseMaker`: one call at a time
    any thread            `ViewState`, which is replaced whole; `ViewLog`

`model.releases` then has what a replica lacks of it. `api.subscribe` sends that.
"""
