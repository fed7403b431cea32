"""From a validated call to a Request, and from token deltas to text, for all front ends alike.

Imported by replica.py, http/, grpc/, metrics/ and dispatch/; imports no HTTP, gRPC or Ray.
Begin with service.py; call.py and errors.py hold the types that the front ends share.
"""
