"""Consumers with a policy: what replicas hold, and the releases that bring them nearer to the model. Internal.

In the order in which a release goes through them:

    registry       the views there are; each has a release loop
    pacing         when a release is due, and why
    release_loop   making releases as they become due
    view           what replicas are given, and what moves it on
    table_maker    the tables that a policy follows, made while the model changes
    release_maker  one release: look, draw it, write it to the log, write it into the tables
    release_draft  what it takes and leaves, until it is made
    release_log    its rows on their way to the log
    table          one table of a view: what replicas hold of it, and which rows are dirty
    dirty_set      the dirty rows of a table, sorted by id: what a release costs, however large the table is
    ranking        which dirty rows a release takes
    sound_rows     the same, while some of the model's are damaged
    store          the view's state, in memory and on disk: a release is written down before replicas get it
    records        the format of what is written down
    history        which version each release was made of, and from where a replica can go on

Threads. What waits for a disk waits in a thread that does nothing else, so that cuts are applied meanwhile.

    the model's thread    rows, stamps and dirty sets of `ViewTable`s: looking for what is dirty, writing, freezing
    the event loop        `View`, `ReleaseLoop`, `ReleaseMaker`, `TableMaker`: one call at a time
    any thread            `ViewState`, which is replaced whole; `ViewStore.flush`, `ViewTable.flush`

`feeds.frozen_release` then has what a replica lacks of it: the rows as they were drawn for one that follows, what
it freezes for others. `api.subscribe` sends that.
"""
