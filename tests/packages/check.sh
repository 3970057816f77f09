#!/bin/sh
# Installs a package in a fresh Debian, uses what it brings, and removes it. Runs in the root of `fresh-root.sh`.
# check.sh KIND FILE; prints `ok NAME` or `FAILED NAME: REASON` for each thing that users rely on.
set -u
kind=$1 file=$2
work=/tmp/work
mkdir -p $work
cd $work || exit 1
# What programs of root leave until the next boot: the broker's folder and the devices' files of sysfs.
runtime=/tmp/ferroce-0
# The broker ends soon after the last program.
export FERROCE_BROKER_LINGER=1

check() {
    name=$1
    shift
    if "$@" >log 2>&1; then
        echo "ok $kind: $name"
    else
        echo "FAILED $kind: $name: $(tail -n 15 log | tr '\n' '/')"
    fi
}

# Runs the rest again until it succeeds, for 30 s: its server may not listen yet.
retry() {
    for _ in $(seq 60); do
        if "$@"; then return 0; fi
        sleep 0.5
    done
    return 1
}

# All that is there, but for the records of the package manager and of the manual.
listing() {
    find / -xdev \( -path /proc -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path $work \) -prune -o -print | sort
}

install_it() {
    case $kind in
    deb) dpkg --install "$file" ;;
    # Where it is unpacked is for the user to say.
    tarball) mkdir /opt/ferroce && tar -C /opt/ferroce --strip-components=1 -xzf "$file" ;;
    # As `COPY --from=ferroce / /` does.
    oci) mkdir image && tar -C image -xf "$file" && tar -C / -xzf "$(layer)" ;;
    esac
}

# The one layer that the manifest of an image layout names.
layer() {
    manifest=$(sed 's/.*"digest":"sha256:\([0-9a-f]*\)".*/\1/' image/index.json)
    digest=$(sed 's/.*"layers":\[{"digest":"sha256:\([0-9a-f]*\)".*/\1/' "image/blobs/sha256/$manifest")
    echo "image/blobs/sha256/$digest"
}

remove_it() {
    # The broker that the last program has started.
    retry sh -c '! pidof ferroce >/dev/null' || return 1
    case $kind in
    deb) dpkg --purge ferroce ;;
    tarball) rm -r /opt/ferroce $runtime ;;
    oci) tar -tzf "$(layer)" | grep -v '/$' | sed s,^,/, | xargs rm && left_folders && rm -r $runtime ;;
    esac
}

# Folders that came with the image.
left_folders() {
    tar -tzf "$(layer)" | sed -n 's,^\(.*\)/$,/\1,p' | grep -Fvxf listed | sort -r | xargs rmdir
}

version() {
    ferroce --version | grep -Eq '^ferroce [0-9.]+ \(.+\)$'
}

pingpong() {
    ferroce run -- ibv_rc_pingpong -g 0 -n 100 >server 2>&1 &
    retry ferroce run -- ibv_rc_pingpong -g 0 -n 100 127.0.0.1 && wait $! && grep -q '100 iters' server
}

rping_() {
    ferroce run -- rping -s -a 127.0.0.1 -C 5 -v >server 2>&1 &
    retry ferroce run -- rping -c -a 127.0.0.1 -C 5 && wait $! && grep -q 'ping data: rdma-ping-4' server
}

# The library takes the place of libibverbs by the dynamic linker alone.
directory() {
    LD_LIBRARY_PATH=$(dirname "$(command -v ferroce)")/../lib/ferroce ibv_devinfo | grep -q ferroce0
}

disk() {
    head -c 8388608 /dev/urandom >disk.img
    head -c 8388608 /dev/urandom >written
    cp disk.img before
    ferroce serve --addr 127.0.0.1 --export disk=disk.img >serve.log 2>&1 &
    serve=$!
    ferroce map --session check --path 127.0.0.1 --device disk --nbd $work/disk.sock >map.log 2>&1 &
    map=$!
    uri="nbd+unix:///?socket=$work/disk.sock"
    # A mapping that has found no server ends.
    retry mapped
    nbdcopy "$uri" read && cmp read before && nbdcopy --flush written "$uri"
    copied=$?
    kill $map
    wait $map
    kill $serve
    wait $serve && [ $copied = 0 ] && cmp written disk.img && return 0
    cat serve.log map.log
    return 1
}

mapped() {
    nbdinfo --size "$uri" && return 0
    if ! kill -0 $map 2>/dev/null; then
        ferroce map --session check --path 127.0.0.1 --device disk --nbd $work/disk.sock >map.log 2>&1 &
        map=$!
    fi
    return 1
}

# The man program is told where only if the package isn't below a folder that it knows.
manual() {
    for page in '1 ferroce' '1 ferroce-map' '1 ferroce-ctl-path-add' '5 ferroce.toml' '7 ferroce'; do
        # Section and name.
        # shellcheck disable=SC2086
        text=$(MANWIDTH=100 man $page) || return 1
        for title in NAME SYNOPSIS 'SEE ALSO'; do
            case $text in *"$title"*) ;; *) [ "$page" = '7 ferroce' ] && [ "$title" = SYNOPSIS ] || { echo "$page: $title"; return 1; } ;; esac
        done
    done
}

# None has a mistake that the formatter warns of.
manual_warnings() {
    pages=$(find "$(dirname "$(command -v ferroce)")/../share/man" -name 'ferroce*' -type f)
    for page in $pages; do
        warned=$(man --warnings -l "$page" 2>&1 >/dev/null)
        [ -z "$warned" ] || { echo "$page: $warned"; return 1; }
    done
    [ "$(echo "$pages" | wc -l)" -gt 20 ]
}

completion_of_bash() {
    folder=$(dirname "$(command -v ferroce)")/../share/bash-completion/completions
    bash -c '. "$1"/ferroce
        complete -p ferroce &&
        COMP_WORDS=(ferroce ser) COMP_CWORD=1 && _ferroce ferroce ser ferroce && [ "${COMPREPLY[*]}" = serve ] &&
        COMP_WORDS=(ferroce map --sess) COMP_CWORD=2 && _ferroce ferroce --sess map && [ "${COMPREPLY[*]}" = --session ]' bash "$folder"
}

# In a terminal, as a key press: there is no other way to ask zsh.
completion_of_zsh() {
    share=$(dirname "$(command -v ferroce)")/../share/zsh
    mkdir -p zsh
    cat >zsh/press <<'END'
zmodload zsh/zpty
export ZDOTDIR=$PWD/zsh TERM=dumb
zpty shell zsh -i
# The keys, Tab, and what prints the line that has come of them.
press() { zpty -w shell "$1"$'\t\x01echo '; zpty -r shell seen "*$2*" || exit 1; print -r -- "$seen"; }
press 'ferroce ser' 'ferroce serve'
press 'ferroce map --sess' 'ferroce map --session'
zpty -d shell
END
    # A package has them in a folder that zsh knows; of the tarball it is told.
    [ "$kind" = tarball ] && path="fpath=($share/site-functions \$fpath)" || path=
    printf '%s\nautoload -U compinit\ncompinit -u -D\n' "$path" >zsh/.zshrc
    timeout 60 zsh -f zsh/press
}

completion_of_fish() {
    share=$(dirname "$(command -v ferroce)")/../share
    complete() { HOME=$work XDG_DATA_DIRS="$share:/usr/share" fish -c "complete -C '$1'" | cut -f 1; }
    [ "$(complete 'ferroce ser')" = serve ] && [ "$(complete 'ferroce map --sess')" = --session ]
}

units() {
    prefix=$(dirname "$(command -v ferroce)")/..
    grep -q '^u ferroce ' "$prefix/lib/sysusers.d/ferroce.conf" || return 1
    for unit in ferroce ferroce-broker; do
        # They start the program that the package has, where it may be chosen.
        path=$(sed -n 's/^ExecStart=\([^ ]*\) .*/\1/p' "$prefix/lib/systemd/system/$unit.service")
        [ "$kind" = tarball ] || [ -x "$path" ] || { echo "$unit: $path"; return 1; }
    done
}

# Where `tshark -G folders` of Debian says.
wireshark() {
    libraries=$(echo /usr/lib/*-linux-gnu/wireshark)
    grep -q ferroce.icrc "$libraries/plugins/ferroce.lua" && "$libraries/extcap/ferroce" --extcap-interfaces | grep -q ferroce
}

copied() {
    ferroce copy /tmp/work/volume && volume/bin/ferroce run -- ibv_devinfo | grep -q ferroce0
}

no_trace() {
    listing >after
    diff listed after
}

listing >listed
check 'installs' install_it
[ "$kind" = tarball ] && PATH=/opt/ferroce/bin:$PATH && export PATH
check '--version names the commit' version
check 'ibv_rc_pingpong' pingpong
check 'rping' rping_
check 'ibv_devinfo with LD_LIBRARY_PATH alone' directory
check 'a block device is served, mapped, read and written' disk
check 'manual pages' manual
check 'manual pages have no warnings' manual_warnings
check 'completion of bash' completion_of_bash
check 'completion of zsh' completion_of_zsh
check 'completion of fish' completion_of_fish
check 'units of systemd' units
[ "$kind" = deb ] && check 'files of Wireshark' wireshark
check 'copy for another container' copied
check 'is removed' remove_it
check 'leaves no trace' no_trace
