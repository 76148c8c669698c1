"""The names of modules under which programs find Reverb's server command; see ``reverb_server``."""

from shmreplay.server_executable import reverb_config_pb2, server_from_proto

__all__ = ["reverb_config_pb2", "server_from_proto"]
