"""The tables of the page of results: functions from results to Markdown, a file for each topic.

`tools/render_results.py` names the result files of each table. Begin with `commits`.
"""
