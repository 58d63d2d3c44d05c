"""The default transport: TLS 1.3 with the standard library. One process at the server, one at each site.

Sites connect outwards and keep the connection open. The server sends requests down it and nothing polls. Both show a
certificate of the federation's authority; the server admits approved keys only, a site the server's pinned key.
"""
