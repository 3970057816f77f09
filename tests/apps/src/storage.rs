//! Storage over RDMA: tgt's iSER target with the programs of libiscsi and with qemu-img, and remote memory by librpma.
//!
//! What is checked of iSER: the target's disk says what it is and how long it is; 32 MiB of random bytes that qemu-img
//! writes are in the target's file byte for byte, and come back the same, and qemu-img finds nothing that differs;
//! iscsi-perf reads with eight commands outstanding for three seconds and ends without an error. Of librpma: `c/rpma.c`.
//!
//! The target's own: tgt 1.0.85, Debian 12's, lets in over iSER only whom an initiator's name is bound for, besides the
//! address ("Target not found (515)" otherwise); later versions are content with either.
//!
//! Of libiscsi's programs, iscsi-ls takes `iscsi://` alone, which is TCP, and iscsi-dd is in no package of Debian's.
//! librpma's examples are in no package either, and Debian's fio has no engine of it.

use crate::cases::{Case, Ready};

const TGT: &str = "tgt";
/// qemu's driver of iSCSI is a module of its own.
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so";

/// The target daemon. Its pool of buffers is 1 GiB unless it is told; it takes ports of RDMA_CM for 16-bit numbers with a sign.
const DAEMON: &str = "export PATH=$PATH:/usr/sbin:/sbin TGT_IPC_SOCKET={dir}/ipc; rm -f {dir}/ipc*
exec tgtd -f -C 7 --iscsi portal={addr}:{port} --iser port=23260,pool_sz_mb=128";

/// Makes a target with one disk, whose file is `disk`, once the daemon takes commands. `patient` tries again what fails because
/// libiscsi 1.19 waits for no answer over iSER longer than a second, which on a busy machine may be too short.
const TARGET: &str = "set -e; export PATH=$PATH:/usr/sbin:/sbin TGT_IPC_SOCKET={dir}/ipc
me=iqn.2026-01.test:initiator target=iqn.2026-01.test:disk
admin() { tgtadm -C 7 --lld iser --mode \"$@\"; }
soon() { for i in $(seq 300); do \"$@\" && return; sleep 0.1; done; echo \"not: $*\"; exit 1; }
truncate -s 32M disk
soon admin target --op new --tid 1 --targetname $target
admin logicalunit --op new --tid 1 --lun 1 --backing-store {dir}/disk
admin target --op bind --tid 1 --initiator-address ALL
admin target --op bind --tid 1 --initiator-name $me
url=iser://{addr}:23260/$target/1
patient() {
    for i in 1 2 3 4 5; do \"$@\" > told 2>&1 && cat told && return; grep -q 'revents is not POLLIN' told || break; done
    cat told; exit 1
}
";

/// What the disk says of itself, and reads.
const TOOLS: &str = "patient iscsi-inq -i $me $url; grep 'Product:VIRTUAL-DISK' told; grep 'Vendor:IET' told
patient iscsi-readcapacity16 -i $me $url; grep 'Total size:33554432' told
iscsi-perf -i $me -t 3 -b 64 -m 8 $url | tee told; grep finished told
echo all told";

/// The way there and back. libiscsi refuses commands of more than 512 KiB over iSER, and qemu-img has no option for less; its filter
/// `blkdebug` cuts them.
const COPIES: &str = "head -c 32M /dev/urandom > source
disk=driver=blkdebug,max-transfer=262144,image.driver=iscsi,image.transport=iser,image.portal={addr}:23260
disk=$disk,image.target=$target,image.lun=1,image.initiator-name=$me
qemu-img convert -n -f raw --target-image-opts source $disk; cmp source disk
qemu-img convert -O raw --image-opts $disk back; cmp source back
qemu-img compare --image-opts driver=file,filename=source $disk
echo all the same";

fn iser(name: &str, package: &'static str, program: &str, text: &str, says: &'static str) -> Case {
    Case::scripts(name, TGT, DAEMON, &format!("{TARGET}{text}"))
        .stopped()
        .says(says)
        .within(300)
        .needs(&[("tgtd", TGT), ("qemu-img", "qemu-utils"), (program, package)])
}

fn rpma() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/rpma.c");
    let side = |name: &str| {
        let build = format!("cc -Wall -Werror -O1 -o {{dir}}/rpma-{name} {source} -lrpma -libverbs");
        format!("{build} && exec {{dir}}/rpma-{name} {name} {{addr}} {{port}}")
    };
    Case::scripts("librpma", "librpma-dev", &side("server"), &side("client"))
        .ready(Ready::Retry)
        .says("every byte is the same")
        .needs(&[("/usr/include/librpma.h", "librpma-dev"), ("cc", "gcc")])
}

pub(crate) fn all() -> Vec<Case> {
    vec![
        iser("iser libiscsi", "libiscsi-bin", "iscsi-perf", TOOLS, "all told"),
        iser("iser qemu-img", "qemu-block-extra", DRIVER, COPIES, "all the same"),
        rpma(),
    ]
}
