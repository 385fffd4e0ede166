use super::*;
use proptest::prelude::*;

fn policy(text: &str) -> Egress {
    text.parse().unwrap()
}

fn labels(name: &str) -> Vec<&[u8]> {
    name.split('.').rev().map(str::as_bytes).collect()
}

proptest! {
    #[test]
    fn any_text_is_a_policy_or_an_error(text in ".{0,100}|([a-z0-9*./:,-]{0,60})") {
        if let Ok(policy) = text.parse::<Egress>() {
            prop_assert_eq!(policy.to_string().parse::<Egress>(), Ok(policy));
        }
    }

    #[test]
    fn a_policy_reads_back(
        rules in proptest::collection::vec(
            ("(10\\.0\\.0\\.0/8|192\\.0\\.2\\.[1-9]|\\*|(\\*\\.)?[a-z]{1,5}\\.[a-z]{1,5})",
             "(|:tcp|:udp|:icmp|:[1-9][0-9]{0,3}|:tcp:[1-9]-99|:udp:53)"),
            1..20,
        )
    ) {
        let text = rules.iter().map(|(a, b)| format!("{a}{b}")).collect::<Vec<_>>().join(",");
        let read = policy(&text);
        prop_assert_eq!(&read.to_string().parse::<Egress>().unwrap(), &read);
        let json = serde_json::to_string(&read).unwrap();
        prop_assert_eq!(serde_json::from_str::<Egress>(&json).unwrap(), read);
    }
}

#[test]
fn equal_policies_have_one_text() {
    for (text, canonical) in [
        ("none", "none"),
        ("internet", "internet"),
        ("B.example.org:443,10.0.0.0/8:tcp:443", "10.0.0.0/8:tcp:443,b.example.org:443"),
        ("example.org.,example.org", "example.org"),
        ("192.0.2.7/32:icmp,192.0.2.7:icmp", "192.0.2.7:icmp"),
        ("*:tcp:443-443", "*:tcp:443"),
        ("*.example.org:udp:1-1023", "*.example.org:udp:1-1023"),
    ] {
        assert_eq!(policy(text).to_string(), canonical, "{text}");
    }
    assert!(policy("internet").is_internet() && policy("none").is_none());
    assert!(policy("none").rules().is_empty() && Egress::default().is_internet());
}

#[test]
fn what_is_no_policy_is_refused_with_its_rule() {
    let many = vec!["192.0.2.1"; 65].join(",");
    let long = "a".repeat(64);
    for (bad, part) in [
        ("", "egress rule \"\""),
        (",", "egress rule \"\""),
        ("example.org,none", "\"none\" is a whole policy"),
        ("internet,10.0.0.0/8", "\"internet\" is a whole policy"),
        ("10.0.0.1/8", "not 10.0.0.1/8"),
        ("10.0.0.0/33", "an IPv4 range"),
        ("10.0.0", "four numbers"),
        ("example", "single label"),
        ("exam ple.org", "or a name"),
        ("münchen.example", "xn--"),
        ("a.*.example.org", "or a name"),
        ("*example.org", "or a name"),
        ("example.org:0", "TARGET"),
        ("example.org:65536", "TARGET"),
        ("example.org:+80", "TARGET"),
        ("example.org:9-8", "TARGET"),
        ("example.org:443:tcp", "TARGET"),
        ("example.org:tcp:udp", "TARGET"),
        ("example.org:sctp", "TARGET"),
        ("example.org:", "TARGET"),
        ("example.org:icmp:8", "no port after icmp"),
        ("2001:db8::1", "no IPv6"),
        ("[::1]:443", "no IPv6"),
        (&format!("{long}.org"), "or a name"),
        (&many, "at most 64 rules"),
        (&"a.b,".repeat(5000), "bytes"),
    ] {
        let error = bad.parse::<Egress>().unwrap_err().to_string();
        assert!(error.contains(part), "{bad:.80}: {error}");
        assert!(error.len() < 400, "{error}");
    }
}

#[test]
fn names_match_whole_labels() {
    let rules = policy("example.org:443,*.example.org:80,*.test:udp:53");
    let of = |name| {
        let services = rules.services_of(&labels(name));
        services.iter().map(|service| service.ports.unwrap().0).collect::<Vec<_>>()
    };
    assert_eq!(of("example.org"), [443]);
    assert_eq!(of("www.example.org"), [80]);
    assert_eq!(of("a.b.example.org"), [80]);
    assert_eq!(of("a.test"), [53]);
    for other in ["example.com", "badexample.org", "org", "test", "example.org.evil.com"] {
        assert_eq!(of(other), [0; 0], "{other}");
    }
    assert!(policy("*:443").resolves(&labels("any.name")) && !rules.resolves(&labels("a.com")));
    assert!(policy("internet").resolves(&labels("a")) && !policy("none").resolves(&labels("a")));
    assert!(!policy("0.0.0.0/0").resolves(&labels("example.org")));
    // A label may have any bytes; a dot within one separates nothing.
    assert!(!rules.resolves(&[b"org", b"x.example"]) && !rules.resolves(&[b"example.org"]));
}

#[test]
fn services_have_protocols_and_ports() {
    let service = |text: &str| policy(&format!("a.b{text}")).rules()[0].service;
    let has =
        |text: &str, packets: [(u8, u16); 6]| packets.map(|(p, port)| service(text).has(p, port));
    let packets = [(6, 443), (17, 443), (6, 80), (17, 53), (1, 0), (47, 0)];
    assert_eq!(has("", packets), [true; 6]);
    assert_eq!(has(":443", packets), [true, true, false, false, false, false]);
    assert_eq!(has(":tcp", packets), [true, false, true, false, false, false]);
    assert_eq!(has(":tcp:80-443", packets), [true, false, true, false, false, false]);
    assert_eq!(has(":udp:53", packets), [false, false, false, true, false, false]);
    assert_eq!(has(":icmp", packets), [false, false, false, false, true, false]);
}
