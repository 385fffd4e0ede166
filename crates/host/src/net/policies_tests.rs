use super::*;

const A: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const B: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 3);

fn policy(text: &str) -> Egress {
    text.parse().unwrap()
}

fn name(name: &str) -> Vec<Box<[u8]>> {
    name.split('.').rev().map(|label| label.as_bytes().into()).collect()
}

fn found(of: &str, addresses: &[&str], ttl_seconds: u64) -> Found {
    let ttl = Duration::from_secs(ttl_seconds);
    let addresses = addresses.iter().map(|ip| (ip.parse().unwrap(), ttl)).collect();
    Found { name: name(of), addresses }
}

/// What a change of the guest's policy changes.
fn set(policies: &mut Policies, guest: Ipv4Addr, text: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    policies.set(guest, &policy(text), &mut changes);
    changes
}

fn open_at(
    policies: &mut Policies,
    guest: Ipv4Addr,
    what: &Found,
    now: Instant,
) -> (usize, Vec<Change>) {
    let mut changes = Vec::new();
    (policies.open(guest, what, now, &mut changes), changes)
}

fn open(policies: &mut Policies, guest: Ipv4Addr, what: &Found) -> (usize, Vec<Change>) {
    open_at(policies, guest, what, Instant::now())
}

#[test]
fn equal_policies_share_a_chain_which_ends_with_its_last_guest() {
    let mut all = Policies::default();
    let one = number(&policy("10.0.0.0/8"));
    let new = Change::NewPolicy(one, policy("10.0.0.0/8"));
    assert_eq!(set(&mut all, A, "10.0.0.0/8"), [new, Change::Limit(Some(one), A)]);
    assert_eq!(set(&mut all, A, "10.0.0.0/8"), []);
    assert_eq!(set(&mut all, B, "10.0.0.0/8"), [Change::Limit(Some(one), B)]);
    let to_none = [Change::Unlimit(Some(one), A), Change::Limit(None, A)];
    assert_eq!(set(&mut all, A, "none"), to_none);
    assert_eq!(set(&mut all, A, "internet"), [Change::Unlimit(None, A)]);
    let last = [Change::Unlimit(Some(one), B), Change::NoPolicy(one, policy("10.0.0.0/8"))];
    assert_eq!(set(&mut all, B, "internet"), last);
    assert!(all.of.is_empty() && all.by_number.is_empty());
    // The end of a guest that had a policy, and of one that had none.
    let mut changes = Vec::new();
    all.remove(A, &mut changes);
    all.remove(A, &mut changes);
    assert_eq!(changes, [Change::Forget(A)]);
}

#[test]
fn policies_of_one_number_are_apart() {
    let mut all = Policies::default();
    set(&mut all, A, "192.0.2.1");
    let number = number(&policy("192.0.2.1"));
    // As if another policy had the same hash.
    let other =
        Arc::new(Policy { egress: policy("192.0.2.2"), ..(*all.by_number[&number]).clone() });
    all.by_number.insert(number, other);
    assert_eq!(all.find(&policy("192.0.2.1")), (number + 1, false));
    assert_eq!(all.find(&policy("192.0.2.2")), (super::number(&policy("192.0.2.2")), false));
}

#[test]
fn a_name_opens_its_public_addresses_for_its_services() {
    let mut all = Policies::default();
    set(&mut all, A, "example.org:443,*.example.org:tcp:22,10.1.0.0/16:tcp:80");
    let answer = found("example.org", &["198.51.100.7", "10.1.2.3", "127.0.0.1"], 300);
    let (left_out, changes) = open(&mut all, A, &answer);
    let number = all.of[&A].unwrap();
    let [Change::Open(of, place, ip, ms)] = changes.as_slice() else { panic!("{changes:?}") };
    assert_eq!((left_out, *of, ip.to_string().as_str(), *ms), (0, number, "198.51.100.7", 450_000));
    assert_eq!(all.by_number[&number].services[*place].ports, Some((443, 443)));
    let to = Ipv4Addr::new(198, 51, 100, 7);
    assert!(all.permits(A, 6, to, 443) && all.permits(A, 17, to, 443));
    assert!(!all.permits(A, 6, to, 22) && !all.permits(A, 1, to, 0));
    let private = Ipv4Addr::new(10, 1, 2, 3);
    assert!(all.permits(A, 6, private, 80) && !all.permits(A, 6, private, 443));
    // An answer that says the same again changes nothing; one that says it later does.
    assert_eq!(open(&mut all, A, &answer).1, []);
    assert_eq!(open(&mut all, A, &found("example.org", &["198.51.100.7"], 900)).1.len(), 1);
    // A name without a rule opens nothing, and so does a guest without rules.
    assert_eq!(open(&mut all, A, &found("example.com", &["198.51.100.8"], 300)).1, []);
    assert_eq!(open(&mut all, B, &answer).1, []);
    set(&mut all, B, "none");
    assert_eq!(open(&mut all, B, &answer).1, []);
    assert!(!all.permits(B, 6, to, 443));
}

#[test]
fn times_are_bounded_and_so_is_the_number_of_addresses() {
    let mut all = Policies::default();
    set(&mut all, A, "*:443");
    let ms = |all: &mut Policies, ip: &str, ttl| {
        let (_, changes) = open(all, A, &found("a.b", &[ip], ttl));
        let [Change::Open(_, _, _, ms)] = changes.as_slice() else { panic!("{changes:?}") };
        *ms
    };
    assert_eq!(ms(&mut all, "198.51.100.1", 0), 90_000);
    assert_eq!(ms(&mut all, "198.51.100.2", u64::from(u32::MAX)), 129_600_000);
    let many: Vec<String> = (0..2000).map(|n| format!("198.50.{}.{}", n / 250, n % 250)).collect();
    let (mut opened, mut left_out) = (2, 0);
    for some in many.chunks(40) {
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        let (left, changes) = open(&mut all, A, &found("a.b", &some, 60));
        (opened, left_out) = (opened + changes.len(), left_out + left);
    }
    // 32 of each answer of 40.
    assert_eq!((opened, left_out), (1024, 2000 - 1022));
    assert_eq!(all.by_number[&all.of[&A].unwrap()].opened.len(), 1024);
}

#[test]
fn a_new_policy_keeps_what_its_names_have_opened() {
    let mut all = Policies::default();
    set(&mut all, A, "a.example:443,b.example:443");
    open(&mut all, A, &found("a.example", &["198.51.100.1"], 300));
    open(&mut all, A, &found("b.example", &["198.51.100.2"], 300));
    let changes = set(&mut all, A, "a.example:80,c.example");
    let opened: Vec<&Change> =
        changes.iter().filter(|one| matches!(one, Change::Open(..))).collect();
    assert_eq!(opened.len(), 1, "{changes:?}");
    let of = |last| Ipv4Addr::new(198, 51, 100, last);
    assert!(all.permits(A, 6, of(1), 80) && !all.permits(A, 6, of(1), 443));
    assert!(!all.permits(A, 6, of(2), 80));
}

#[test]
fn an_address_stays_open_for_as_long_as_each_answer_says() {
    let mut all = Policies::default();
    set(&mut all, A, "a.example:443,b.example:443");
    let (begin, number) = (Instant::now(), all.of[&A].unwrap());
    let to = Ipv4Addr::new(198, 51, 100, 1);
    let opened = Change::Open(number, 0, to, 90_000);
    for (of, at, changes) in [
        ("a.example", 0, true),
        ("a.example", 30, false),
        ("b.example", 31, true),
        ("a.example", 61, false),
        // The address was open until 121 s.
        ("a.example", 300, true),
    ] {
        let now = begin + Duration::from_secs(at);
        let answer = found(of, &["198.51.100.1"], 60);
        let expected = changes.then(|| opened.clone()).into_iter().collect();
        assert_eq!(open_at(&mut all, A, &answer, now), (0, expected), "{at} s");
        let until = all.by_number[&number].opened[&(0, to)].until;
        assert!(until >= now + Duration::from_secs(60), "{at} s");
    }
}

#[test]
fn closed_addresses_make_room_and_a_full_service_keeps_its_addresses() {
    let mut all = Policies::default();
    set(&mut all, A, "*:443,b.example:80");
    let (begin, number) = (Instant::now(), all.of[&A].unwrap());
    let many: Vec<String> = (0..1024).map(|n| format!("198.50.{}.{}", n / 250, n % 250)).collect();
    for some in many.chunks(32) {
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        assert_eq!(open_at(&mut all, A, &found("a.example", &some, 60), begin).0, 0);
    }
    // A new address finds room at one of two services; one that is open stays so for longer.
    let later = begin + Duration::from_secs(60);
    let mixed = found("b.example", &["198.51.100.1", &many[0]], 60);
    let (left_out, changes) = open_at(&mut all, A, &mixed, later);
    let of = |place| {
        changes.iter().filter(move |one| matches!(one, Change::Open(_, at, ..) if *at == place))
    };
    assert_eq!((left_out, of(0).count(), of(1).count()), (1, 2, 1));
    let policy = |all: &Policies| all.by_number[&number].clone();
    assert_eq!(policy(&all).room_at(1, later), 0);
    // Only that address is still open.
    let closed = begin + Duration::from_secs(91);
    assert_eq!(policy(&all).room_at(1, closed), 1023);
    assert_eq!(open_at(&mut all, A, &mixed, closed).0, 0);
    assert_eq!(policy(&all).opened_at(1).count(), 2);
}

#[test]
fn what_was_opened_is_undone() {
    let mut all = Policies::default();
    set(&mut all, A, "*:443");
    let number = all.of[&A].unwrap();
    let part = all.part_of(A);
    assert_eq!(open(&mut all, A, &found("a.example", &["198.51.100.1"], 60)).1.len(), 1);
    all.restore(part);
    assert!(all.by_number[&number].opened.is_empty());
    assert_eq!(all.part_of(B).by_number.len(), 0);
}
