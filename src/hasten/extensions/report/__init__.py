"""`hasten report`: a page about a run. Start with `report_data.py` (reads the run), then `report_page.py` (HTML)."""
