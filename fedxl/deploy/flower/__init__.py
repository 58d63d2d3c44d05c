"""Everything of Flower that fedxl uses. No other module of fedxl imports `flwr`.

Much of it is not part of Flower's public interface and may change with any version: this is the list to check. There
is one file for each kind of process, so that each loads only what it needs. SuperLink's command alone imports 200
modules of Flower; the gateway needs nothing but protobuf messages.

    protobuf    messages on the wire; all that the gateway needs
    common      records, messages and the objects they travel as: server, sites and Flower's simulation
    http        what all HTTP clients share
    server      the server's app: its connection to SuperLink
    site        a site's connection to the gateway
    superlink   the command that starts SuperLink
"""
