"""What the server's app needs to talk to its own SuperLink: clients, requests, the grid."""

from flwr.cli.build import build_fab_from_files as build_fab_from_files
from flwr.common.constant import Status as Status
from flwr.common.constant import SubStatus as SubStatus
from flwr.proto.control_pb2 import ListNodesRequest as ListNodesRequest
from flwr.proto.control_pb2 import ListRunsRequest as ListRunsRequest
from flwr.proto.control_pb2 import RegisterNodeRequest as RegisterNodeRequest
from flwr.proto.control_pb2 import StartRunRequest as StartRunRequest
from flwr.proto.control_pb2 import StopRunRequest as StopRunRequest
from flwr.proto.fab_pb2 import Fab as Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest as AcquireTaskRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest as PullTaskInputRequest
from flwr.proto.runtime_pb2 import PushTaskOutputRequest as PushTaskOutputRequest
from flwr.supercore.constant import TaskType as TaskType
from flwr.supercore.control import ControlHttpClient as ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender as HeartbeatSender
from flwr.supercore.heartbeat import make_task_heartbeat_fn_http as make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor as RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
from flwr.superlink.grid import HttpGrid as HttpGrid
