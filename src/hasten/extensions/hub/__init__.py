"""Models on the Hub: `push_to_hub()` and `load_model("hf://owner/name")`.

Start with `publishing.py`, the uploads of a run; `client.py` talks to the Hub, `model_card.py` writes the card.
"""
