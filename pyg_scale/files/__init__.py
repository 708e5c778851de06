"""Plain files that processes share: arrays, pickles that run nothing, locks, renames."""
