#!/bin/sh
# Uses ferroce's units on the machine that systemd has booted, says `ok NAME` or `FAILED NAME: REASON` of each thing, and powers off.
# Runs in the container of `booted.sh`.
set -u
control=/run/ferroce-daemon/control.sock
cd /root || exit 1

check() {
    name=$1
    shift
    if "$@" >log 2>&1; then
        echo "ok units: $name"
    else
        echo "FAILED units: $name: $(tail -n 15 log | tr '\n' '/')"
    fi
}

configure() {
    printf '[serve.disks]\naddr = ["127.0.0.1"]\nexport = ["disk=/images/disk.img"]\n%s\n' "${1-}" >/etc/ferroce.toml
    chgrp ferroce-daemon /etc/ferroce.toml && chmod 640 /etc/ferroce.toml
}

property() {
    systemctl show --property "$1" --value "$2"
}

# Runs the rest again until it succeeds, for 60 s.
retry() {
    for _ in $(seq 120); do
        if "$@"; then return 0; fi
        sleep 0.5
    done
    return 1
}

users() {
    useradd -m -G ferroce-admin admin && useradd -m -G ferroce user && useradd -m nobody-else
}

disk() {
    mkdir /images && truncate -s 64M /images/disk.img && chgrp ferroce-daemon /images/disk.img && chmod g+rw /images/disk.img &&
        mkdir -p /etc/systemd/system/ferroce.service.d &&
        printf '[Service]\nReadWritePaths=/images\n' >/etc/systemd/system/ferroce.service.d/images.conf && systemctl daemon-reload
}

started() {
    systemctl start ferroce-broker ferroce && systemctl is-active ferroce-broker ferroce
}

# Neither has more than its unit says.
rights() {
    [ "$(sed -n 's/^CapEff:\t*//p' "/proc/$(property MainPID ferroce)/status")" = 0000000000000000 ] &&
        [ "$(stat -c %U:%G "/proc/$(property MainPID ferroce)")" = ferroce-daemon:ferroce-daemon ] &&
        [ "$(stat -c %U:%G "/proc/$(property MainPID ferroce-broker)")" = ferroce:ferroce ] &&
        [ "$(stat -c %a:%G $control)" = 660:ferroce-admin ]
}

# The control socket is for root and the members of its group, and not for those of the broker's.
members() {
    su admin -c "ferroce ctl --socket $control ls" || return 1
    for who in user nobody-else; do
        if su $who -c "ferroce ctl --socket $control ls"; then return 1; fi
    done
}

# A user of the broker's group maps a disk of the daemon's at an address that the broker shares.
mapped() {
    su user -c "ferroce map --session user --addr 127.0.0.2 --path 127.0.0.1 --device $1 --nbd /home/user/disk.sock" >map.log 2>&1 &
    retry nbdinfo --size "nbd+unix:///?socket=/home/user/disk.sock"
    found=$?
    pkill -u user ferroce
    wait
    [ $found = 0 ] || cat map.log
    return $found
}

reloaded() {
    truncate -s 1M /images/more.img && chgrp ferroce-daemon /images/more.img && chmod g+rw /images/more.img &&
        configure '' && sed -i 's,\["disk=,["more=/images/more.img"\, "disk=,' /etc/ferroce.toml && systemctl reload ferroce && mapped more
}

# A mistake in the file: the daemon goes on, and who reloads is told.
mistake_at_reload() {
    configure 'mistake = 1'
    if systemctl reload ferroce; then return 1; fi
    configure && systemctl is-active ferroce && systemctl reload ferroce
}

# It is not tried again and again.
mistake_at_start() {
    systemctl stop ferroce && configure 'mistake = 1'
    if systemctl start ferroce; then return 1; fi
    [ "$(property NRestarts ferroce)" = 0 ] && configure && systemctl start ferroce
}

restarted() {
    before=$(property NRestarts "$1")
    kill -"$2" "$(property MainPID "$1")"
    more() { [ "$(property NRestarts "$1")" -gt "$before" ] && systemctl is-active "$1"; }
    retry more "$1"
}

# What systemd-analyze calls the exposure, of 10.
exposure() {
    systemd-analyze security --no-pager "$1" | tail -n 1 | grep -Eq ' ([0-2]\.[0-9]|3\.0) OK'
}

stopped() {
    systemctl stop ferroce ferroce-broker && [ ! -e /run/ferroce-daemon ] && ! pidof ferroce
}

check 'users of each group' users
check 'a disk for the daemon' disk
configure
check 'both start' started
check 'rights' rights
check 'control socket' members
check 'a user maps a disk by the broker' mapped disk
check 'reload' reloaded
check 'mistake at a reload' mistake_at_reload
check 'mistake at the start' mistake_at_start
check 'daemon killed' restarted ferroce KILL
check 'broker killed' restarted ferroce-broker KILL
check 'watchdog' restarted ferroce STOP
check 'exposure of the daemon' exposure ferroce
check 'exposure of the broker' exposure ferroce-broker
check 'both stop' stopped
systemctl poweroff 2>/dev/null
