//! RoCEv2 in userspace: devices, protection domains, memory regions, completion queues, queue pairs.
