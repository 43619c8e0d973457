"""Configure etcd and the Kubernetes components: certificates, command lines, a client, the first objects."""
