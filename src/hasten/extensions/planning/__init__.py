"""Settings before a job starts: `plan/` predicts them from one traced step, `tune/` measures them in short runs."""
