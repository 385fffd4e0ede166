# image.sh CACHE NAME PACKAGES SOURCES PREPARE -- COMMAND...
#
# Builds a root file system from a base and one set of packages over the base, mounts it, and runs
# COMMAND in its folder. CACHE keeps the base and a layer for each set. Needs root and a private
# mount namespace, because the end of the namespace also removes the mounts of a killed script.
#   PACKAGES, SOURCES   packages and source packages, separated by spaces
#   PREPARE             a text for /bin/sh, run in the new system at the host's speed
set -eu
cache=$1 name=$2 packages=$3 sources=$4 prepare=$5
shift 6
suite=bookworm
umask 022
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

mkdir -p "$cache/debs/partial" "$cache/lists/partial" "$cache/layers"
exec 9>"$cache/lock"
flock 9

# The base is never rebuilt, because the layers of all sets depend on it.
if ! [ -d "$cache/base" ]; then
    rm -rf "$cache/base.new"
    mkdir "$cache/base.new"
    mmdebstrap --quiet --variant=minbase --format=tar \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
        --dpkgopt=force-unsafe-io "$suite" - |
        tar -C "$cache/base.new" --numeric-owner --xattrs -xf -
    printf '#!/bin/sh\nexit 101\n' >"$cache/base.new/usr/sbin/policy-rc.d"
    chmod 755 "$cache/base.new/usr/sbin/policy-rc.d"
    : >"$cache/base.new/etc/hostname"
    sed -n 's/^deb /deb-src /p' "$cache/base.new/etc/apt/sources.list" >"$cache/sources.list"
    mv "$cache/base.new" "$cache/base"
fi

work=$(mktemp -d "$cache/work.XXXXXX")
trap 'umount -R -l "$work/merged" 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
mkdir "$work/up" "$work/over" "$work/merged"
layer=$cache/layers/$name.tar.zst
[ ! -f "$layer" ] || zstd -dqc "$layer" |
    tar -C "$work/up" --numeric-owner --xattrs --xattrs-include='*' -xf -
overlay="lowerdir=$cache/base,upperdir=$work/up,workdir=$work/over"
mount -t overlay overlay -o "$overlay" "$work/merged"

if ! [ -f "$layer" ]; then
    root=$work/merged
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmp "$root/tmp"
    mount --rbind /dev "$root/dev"
    mount --bind "$cache/debs" "$root/var/cache/apt/archives"
    mount --bind "$cache/lists" "$root/var/lib/apt/lists"
    cp /etc/resolv.conf "$root/tmp/resolv.conf"
    : >>"$root/etc/resolv.conf"
    mount --bind "$root/tmp/resolv.conf" "$root/etc/resolv.conf"
    run() {
        chroot "$root" env -u TMPDIR HOME=/root \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
    }
    apt() {
        run apt-get -q -y -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root \
            -o APT::Keep-Downloaded-Packages=true "$@" >"$work/log" 2>&1 9>&- ||
            { tail -n 20 "$work/log" >&2; exit 1; }
    }
    # At most twelve hours old, because a mirror drops superseded packages.
    [ -n "$(find "$cache/lists" -maxdepth 1 -name '*_Packages*' -mmin -720 -print -quit)" ] ||
        apt update
    [ -z "$packages" ] || apt install --no-install-recommends $packages
    if [ -n "$sources" ]; then
        cp "$cache/sources.list" "$root/etc/apt/sources.list.d/src.list"
        mkdir -p "$root/usr/src"
        mkdir -p "$work/lists" && mount --bind "$work/lists" "$root/var/lib/apt/lists"
        apt update
        for source in $sources; do
            run sh -c "cd /usr/src &&
                apt-get -q --download-only -o APT::Sandbox::User=root source $source >/dev/null" \
                9>&-
            run sh -c "cd /usr/src && mkdir $source &&
                tar -xf $source*.orig.tar.* -C $source --strip-components=1 &&
                rm -f $source*.*" 9>&-
        done
        umount "$root/var/lib/apt/lists"
        rm "$root/etc/apt/sources.list.d/src.list"
    fi
    [ -z "$prepare" ] || run sh -euc "$prepare" 9>&-
    umount "$root/etc/resolv.conf" "$root/var/lib/apt/lists" "$root/var/cache/apt/archives" \
        "$root/tmp" "$root/proc"
    umount -l "$root/dev"
    # Logs and caches of the build are no part of an image.
    find "$root/var/log" -type f -delete
    rm -f "$root"/var/cache/apt/*.bin "$root"/var/cache/ldconfig/aux-cache \
        "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
    tar -C "$work/up" --numeric-owner --xattrs --xattrs-include='*' \
        --exclude=./dev --exclude=./proc -cf - . | zstd -q -T0 -3 -o "$layer.new"
    mv "$layer.new" "$layer"
fi
flock -u 9
cd "$work/merged"
"$@"
