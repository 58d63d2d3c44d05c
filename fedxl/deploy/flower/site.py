"""What a site needs to talk to the gateway as one of Flower's nodes."""

from flwr.supernode.fleet_http_client import FleetHttpClient as FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor as NodeAuthHttpInterceptor
