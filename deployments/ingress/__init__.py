"""What clients reach: one process with the HTTP, gRPC and metrics listeners. No torch.

Imported by app.py alone.
Begin with replica.py, then core/service.py, which every front end calls.
"""
