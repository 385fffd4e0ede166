//! The images: package sets of Debian over one base, each with the service that its snapshot has running.

use dayfly_e2e::bench::images::Set;

/// What is asked over HTTP.
const GET: &str = r"GET / HTTP/1.0\r\n\r\n";
/// A DNS query for the address of localhost, as TCP has it.
const DNS: &str =
    r"\x00\x1b\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x09localhost\x00\x00\x01\x00\x01";

/// The fleet.
pub const FLEET: [Set; 28] = [
    Set::service("python", "python3", "cd /srv && python3 -m http.server 8000 &", (8000, GET)),
    Set::service(
        "node",
        "nodejs",
        r#"node -e 'require("http").createServer((q, r) => r.end("here\n")).listen(8000)' &"#,
        (8000, GET),
    ),
    Set::service(
        "perl",
        "perl",
        r#"perl -MIO::Socket::INET -MPOSIX -MData::Dumper -e '$l = IO::Socket::INET->new(Listen => 5, LocalPort => 8000, ReuseAddr => 1) or die $!;
            while ($c = $l->accept) { <$c>; print $c "here\n"; close $c }' &"#,
        (8000, GET),
    ),
    Set::service(
        "ruby",
        "ruby",
        r#"ruby -rsocket -rjson -e 's = TCPServer.new(8000); loop { c = s.accept; c.gets; c.puts "here"; c.close }' &"#,
        (8000, GET),
    ),
    Set::service("php", "php-cli", "php -S 127.0.0.1:8000 -t /srv &", (8000, GET)),
    Set::service(
        "lua",
        "lua5.4 lua-socket",
        r#"lua5.4 -e 's = assert(require("socket").bind("*", 8000)) while true do c = s:accept() c:receive() c:send("here\n") c:close() end' &"#,
        (8000, GET),
    ),
    Set::service(
        "erlang",
        "erlang-base",
        r#"erl -noshell -eval '{ok, L} = gen_tcp:listen(8000, [binary, {active, false}, {reuseaddr, true}]),
            F = fun(F) -> {ok, S} = gen_tcp:accept(L), gen_tcp:recv(S, 0), gen_tcp:send(S, <<"here\n">>), gen_tcp:close(S), F(F) end, F(F).' &"#,
        (8000, GET),
    ),
    Set::service(
        "sbcl",
        "sbcl",
        r#"sbcl --noinform --non-interactive --eval '(require :sb-bsd-sockets)' --eval '(let ((s (make-instance (quote sb-bsd-sockets:inet-socket) :type :stream :protocol :tcp)))
            (sb-bsd-sockets:socket-bind s #(127 0 0 1) 8000) (sb-bsd-sockets:socket-listen s 5)
            (loop (let* ((c (sb-bsd-sockets:socket-accept s)) (o (sb-bsd-sockets:socket-make-stream c :input t :output t))) (read-line o) (write-line "here" o) (close o))))' &"#,
        (8000, GET),
    ),
    Set::service("nginx", "nginx-light", "nginx", (80, GET)),
    Set::service("apache", "apache2", "apachectl start", (80, GET)),
    Set::service("lighttpd", "lighttpd", "lighttpd -f /etc/lighttpd/lighttpd.conf", (80, GET)),
    Set::service("caddy", "caddy", "caddy file-server --root /srv --listen :8000 &", (8000, GET)),
    Set::service(
        "haproxy",
        "haproxy",
        "printf 'frontend f\\n bind :8000\\n mode http\\n http-request return status 200\\n' >/run/f.cfg
         mkdir -p /run/haproxy && haproxy -D -f /etc/haproxy/haproxy.cfg -f /run/f.cfg",
        (8000, GET),
    ),
    Set::service(
        "redis",
        "redis-server",
        "redis-server --daemonize yes --dir /var/lib/redis",
        (6379, r"PING\r\n"),
    ),
    Set::service("memcached", "memcached", "memcached -d -u nobody", (11211, r"version\r\n")),
    Set::service(
        "postgresql",
        "postgresql-15",
        "pg_ctlcluster 15 main start",
        (5432, r"\x00\x00\x00\x08\x04\xd2\x16\x2f"),
    ),
    Set::service(
        "mariadb",
        "mariadb-server",
        "install -d -o mysql -g mysql /run/mysqld && mariadbd --user=mysql &",
        (3306, ""),
    ),
    Set::service("etcd", "etcd-server", "etcd --data-dir /var/lib/etcd/default &", (2379, GET)),
    Set::service("influxdb", "influxdb", "influxd -config /etc/influxdb/influxdb.conf &", (8086, GET)),
    Set::service("beanstalkd", "beanstalkd", "beanstalkd -l 127.0.0.1 -p 11300 &", (11300, r"stats\r\n")),
    Set::service(
        "slapd",
        "slapd",
        "install -d -o openldap -g openldap /run/slapd && slapd -h ldap:/// -F /etc/ldap/slapd.d -u openldap -g openldap",
        (389, r"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00"),
    ),
    Set::service("bind", "bind9", "install -d -o bind -g bind /run/named && named -u bind", (53, DNS)),
    Set::service(
        "unbound",
        "unbound",
        "printf 'server:\\n use-syslog: no\\n chroot: \"\"\\n' >/run/u.conf && unbound -d -p -c /run/u.conf &",
        (53, DNS),
    ),
    Set::service("dnsmasq", "dnsmasq", "dnsmasq --no-resolv", (53, DNS)),
    Set::service(
        "mosquitto",
        "mosquitto",
        "mosquitto -d -p 1883",
        (1883, r"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a"),
    ),
    Set::service(
        "ssh",
        "openssh-server",
        "install -d /run/sshd && rm -f /etc/ssh/ssh_host_* && ssh-keygen -q -A && /usr/sbin/sshd",
        (22, ""),
    ),
    Set::service("exim", "exim4-daemon-light", "exim4 -bd -q30m", (25, "")),
    Set::service("dovecot", "dovecot-imapd", "dovecot", (143, "")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_e2e::bench::scripts::WORKLOADS;
    use dayfly_units::Name;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_names_and_each_is_there_once() {
        let names: BTreeSet<&str> = FLEET.iter().chain([&WORKLOADS]).map(|set| set.name).collect();
        assert_eq!(names.len(), FLEET.len() + 1);
        names.iter().for_each(|name| drop(name.parse::<Name>().expect("a name")));
    }
}
