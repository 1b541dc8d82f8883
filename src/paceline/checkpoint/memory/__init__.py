"""The newest states, kept in memory on their node and on another one."""
