"""The store in SQLite files of one process, for a machine without Redis.

Imported by ../factory.py.
Begin with store.py; writer.py has the one thread that writes, tables.py the SQL.
"""
