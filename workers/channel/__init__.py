"""The worker's end of the token path: framed messages over one TCP connection for each ingress. No
torch.

Imported by worker.py; the ingress imports codec.py and framing.py.
Begin with server.py.
"""
