# Runs in the guest as its first script: the interfaces eth0 and eth1 with an IPv4 and an IPv6 address each, rdma_rxe as rxe0
# on eth0 (a scenario that needs rxe1 adds it), then host-agent, which runs scripts. The kernel can't load modules by itself
# here (its helper runs in the initramfs).
modprobe virtio_net; ip link set lo up
for n in 0 1; do
    grep -q "^52:54:00:00:0$n:" /sys/class/net/eth$n/address || echo "eth$n is another card"
    ip link set eth$n up mtu "$GUEST_MTU"
    ip addr add "10.7$((7 + n)).0.$GUEST_ID/24" dev eth$n
    ip addr add "fd7$((7 + n))::$GUEST_ID/64" dev eth$n nodad
done
for m in crc32_generic crc32_pclmul rdma_rxe rdma_ucm ib_uverbs ib_umad sch_netem sch_ingress ifb act_mirred cls_matchall loop ext4; do
    modprobe -q $m || echo "no module $m"
done
modprobe -q brd rd_size=65536 rd_nr=2 || echo "no module brd"
rdma link add rxe0 type rxe netdev eth0
# From 6.2 on rdma_rxe says only when asked that it repeated a registration.
mount -t debugfs d /sys/kernel/debug
echo 'module rdma_rxe format "not free" +p' > /sys/kernel/debug/dynamic_debug/control
echo "guest $GUEST_ID is up, Linux $(uname -r)"
exec "$LAB/host-agent" -s -p 7001 "$LAB"
