"""Extensions that come with hasten, one folder each; any folder can be deleted.

Each declares what it offers in its `extension.py`. `hasten.extension` finds them; the core imports none of them by name.
"""
