"""`hasten top`: a live table of the ranks of this machine, in another terminal."""
