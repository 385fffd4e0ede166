#!/bin/busybox sh
# What runs in the fixtures: makes page cache, processes and free memory, tells what it knows of its memory, and sleeps.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o huge=always tmp /tmp
mount -t ext4 /dev/nvme0n1 /mnt
stty -F /dev/ttyS1 raw -echo
exec 3> /dev/ttyS1

# What lies free on a CPU's own list has no flag, and gets one when the list is emptied: Linux 6.12 lets these lists grow to an eighth of all memory, and
# empties them some time later. Here they stay short.
echo 100000 > /proc/sys/vm/percpu_pagelist_high_fraction
# What is told of pages must hold until they are frozen: nothing is made a huge page later.
echo 100000000 > /sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs
# Linux leaves it off where there is less than 512 MiB.
echo always > /sys/kernel/mm/transparent_hugepage/enabled
cat /mnt/files/* > /dev/null
dd if=/dev/urandom of=/tmp/kept bs=1M count=24 2> /dev/null
dd if=/dev/zero of=/tmp/gone bs=1M count=40 2> /dev/null
rm /tmp/gone
for i in 1 2 3 4 5 6 7; do /mnt/bin/busybox sleep 100000 & done
/mnt/bin/busybox awk 'BEGIN { for (i = 0; i < 200000; i++) a[i] = i "x"; system("touch /tmp/ready; sleep 100000") }' &
awk=$!
# A buffer of huge pages, full and never taken from.
dd if=/dev/zero bs=16M count=1 2> /dev/null | sleep 100000 &
until [ -e /tmp/ready ]; do sleep 0.1; done
sync
sleep 1

# Pages of a process' mapping that holds this word, as /proc/PID/pagemap tells them: 8 bytes for each.
pages() {
    range=$(grep "$2" /proc/$1/maps | head -n 1 | cut -d ' ' -f 1)
    start=$((0x${range%-*} / 4096)) end=$((0x${range#*-} / 4096))
    dd if=/proc/$1/pagemap bs=8 skip=$start count=$((end - start)) 2> /dev/null
}
# Each is a gzip member of its own, kpageflags last.
cat /proc/iomem | gzip -1 >&3
head -c 16384 /proc/kcore | gzip -1 >&3
pages $awk ' r-xp .*busybox' | gzip -1 >&3
pages $awk 'heap' | gzip -1 >&3
gzip -1 < /proc/kpageflags >&3
# It returns when all of that was sent: what freezes the guest takes the rest with it.
stty -F /dev/ttyS1 raw -echo
echo FROZEN
sleep 100000
