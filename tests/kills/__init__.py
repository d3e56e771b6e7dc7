"""Writers that are killed at random moments.

A process writes one version after another over the same files and is killed. What it leaves is read: it must
be a single version, the last one that was finished or the one after it. The next run, in another process,
must leave no other files than an undisturbed one.
"""
