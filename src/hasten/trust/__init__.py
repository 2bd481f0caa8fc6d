"""What watches a run: stalls, ranks that differ, losses that are not finite, memory. Each folder is one watch."""
