# Runs in the guest as its first script: the interface eth0 with an IPv4 and an IPv6 address, rdma_rxe as rxe0 on it,
# then host-agent, which runs scripts. The kernel can't load modules by itself here (its helper runs in the initramfs).
modprobe virtio_net; ip link set lo up
IF=$(ls /sys/class/net | grep -v '^lo$' | head -1); [ "$IF" = eth0 ] || ip link set "$IF" name eth0
ip link set eth0 up mtu "$GUEST_MTU"
ip addr add "10.77.0.$GUEST_ID/24" dev eth0; ip addr add "fd77::$GUEST_ID/64" dev eth0 nodad
for m in crc32_generic crc32_pclmul rdma_rxe rdma_ucm ib_uverbs ib_umad sch_netem sch_ingress ifb act_mirred cls_matchall loop ext4; do
    modprobe -q $m || echo "no module $m"
done
modprobe -q brd rd_size=65536 rd_nr=2 || echo "no module brd"
rdma link add rxe0 type rxe netdev eth0
echo "guest $GUEST_ID is up"
exec "$LAB/host-agent" -s -p 7001 "$LAB"
