# Functions of setup.sh, kernel.sh and lustre.sh about Debian's packages.

fail() { echo "$1" >&2; exit 1; }

# The archive may refuse a connection, and another run may be installing.
export PATIENT="-o Acquire::Retries=3 -o DPkg::Lock::Timeout=300"
update() {
    [ "$(id -u)" = 0 ] || { echo "the lab needs root (network namespaces, taps, packages)" >&2; exit 1; }
    [ -n "${UPDATED:-}" ] || apt-get update -q $PATIENT >/dev/null </dev/null || return
    export UPDATED=yes
}

# Unpacks packages into a folder: they are not installed.
unpack() {
    local to=$1 package; shift
    rm -rf deb; mkdir deb; chmod 777 deb
    (cd deb && apt-get download -q $PATIENT "$@" >/dev/null </dev/null) || fail "no package $* can be had"
    for package in deb/*.deb; do dpkg -x "$package" "$to"; done
    rm -rf deb
}

# Packages of these kinds that a package of the kernel depends on.
parts() { apt-cache depends "$1" | sed -n -E "s/.*Depends: (linux-($2)-.*)/\1/p"; }

# Unpacks the headers of a kernel of this distribution into `headers`. Sets BUILD, the folder in which make builds modules, and CC, the
# compiler that the kernel was built with, which is installed if it is missing.
headers() {
    local name=linux-headers-$1
    unpack headers "$name" $(parts "$name" 'headers|kbuild')
    BUILD=$PWD/headers/usr/src/$name
    sed -i "s#/usr/src/#$PWD/headers/usr/src/#g" "$BUILD/Makefile"
    CC=$(sed -n -E 's/.*(gcc-[0-9]+).*/\1/p' "$BUILD/.kernelvariables" | head -1)
    [ -z "$CC" ] || command -v "$CC" >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q $PATIENT --no-install-recommends "$CC" >/dev/null </dev/null
}
