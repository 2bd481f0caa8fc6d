"""Names of bundled extensions that `from hasten import ...` provides, for type checkers; the running program finds them by declaration.

An import whose folder was deleted is ignored: `# type: ignore[import-not-found, unused-ignore]` on its line says so.
"""
