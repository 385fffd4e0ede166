#!/bin/busybox sh
# Runs in the fixtures: makes page cache, processes and free memory, reports on its memory, and
# sleeps.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o huge=always tmp /tmp
mount -t ext4 /dev/nvme0n1 /mnt
stty -F /dev/ttyS1 raw -echo
exec 3> /dev/ttyS1

# A page on a CPU's list of free pages has no flag until Linux empties the list. Linux 6.12 lets
# these lists grow to an eighth of all memory. Here they stay short.
echo 100000 > /proc/sys/vm/percpu_pagelist_high_fraction
# A report on pages must hold until the guest is frozen, so no page becomes a huge page later.
echo 100000000 > /sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs
# Linux leaves it off where there is less than 512 MiB.
echo always > /sys/kernel/mm/transparent_hugepage/enabled
cat /mnt/files/* > /dev/null
dd if=/dev/urandom of=/tmp/kept bs=1M count=24 2> /dev/null
dd if=/dev/zero of=/tmp/gone bs=1M count=40 2> /dev/null
rm /tmp/gone
for i in 1 2 3 4 5 6 7; do /mnt/bin/busybox sleep 100000 & done
fill='BEGIN { for (i = 0; i < 200000; i++) a[i] = i "x"; system("touch /tmp/ready; sleep 100000") }'
/mnt/bin/busybox awk "$fill" &
awk=$!
# A buffer of huge pages, full and never taken from.
dd if=/dev/zero bs=16M count=1 2> /dev/null | sleep 100000 &
until [ -e /tmp/ready ]; do sleep 0.1; done
sync
sleep 1

# The entries of /proc/PID/pagemap, 8 bytes each, for the mapping of a process that holds a word.
pages() {
    range=$(grep "$2" /proc/$1/maps | head -n 1 | cut -d ' ' -f 1)
    start=$((0x${range%-*} / 4096)) end=$((0x${range#*-} / 4096))
    dd if=/proc/$1/pagemap bs=8 skip=$start count=$((end - start)) 2> /dev/null
}
# Each report is one gzip member, kpageflags last.
cat /proc/iomem | gzip -1 >&3
head -c 16384 /proc/kcore | gzip -1 >&3
pages $awk ' r-xp .*busybox' | gzip -1 >&3
pages $awk 'heap' | gzip -1 >&3
gzip -1 < /proc/kpageflags >&3
# stty returns when all bytes were sent. The freeze would lose the rest.
stty -F /dev/ttyS1 raw -echo
echo FROZEN
sleep 100000
