//! What the pool wants, and how long a creation lasts.

use super::*;
use dayfly_store::Digest;
use dayfly_units::CpuModel;

fn template(name: &str, memory_bytes: u64) -> Template {
    let shape = Shape {
        memory_bytes,
        vcpus: 1,
        max_vcpus: 0,
        disks: 1,
        nets: 0,
        cpu_model: CpuModel::Host,
    };
    Template { name: name.parse().unwrap(), fingerprint: Digest::of(b"s"), shape }
}

#[test]
fn a_full_pool_makes_room_for_something_else_and_for_nothing() {
    // A pool without places is full.
    let pool = Pool::new(0);
    let asked = |name: &str, memory_bytes, ago| {
        let demand = Demand::new(Instant::now().checked_sub(ago).unwrap());
        lock(&pool.shelves).demand.insert(template(name, memory_bytes), demand);
    };
    let known = || lock(&pool.shelves).demand.len();
    asked("a", 64 << 20, WINDOW * 2);
    pool.surplus();
    assert_eq!(known(), 1, "it was forgotten, for nothing");
    asked("b", 128 << 20, Duration::ZERO);
    pool.surplus();
    assert_eq!(known(), 1);
    assert!(
        lock(&pool.shelves).demand.contains_key(&template("b", 128 << 20)),
        "the newer one went"
    );
}

#[test]
fn as_many_warm_vmms_wait_as_forks_took_at_once() {
    let pool = Pool::new(64);
    let (few, many) = (template("a", 64 << 20).shape, template("b", 128 << 20).shape);
    pool.expect_shape(few);
    for _ in 0..20 {
        assert!(pool.take_warm_vmm(many, 0).is_none());
    }
    let wanted = |shape| lock(&pool.shelves).warm_vmms(shape, Instant::now());
    assert_eq!((wanted(few), wanted(many)), (LEAST, 20));
    assert!(matches!(pool.missing(), Some(Missing::WarmVmm(_))));
}

#[tokio::test(start_paused = true)]
async fn a_creation_lasts_until_its_program_has_written_something_but_not_for_ever() {
    let pool = Arc::new(Pool::new(1));
    let ended = async || {
        let none = async {
            while pool.creations.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(5), none).await.is_ok()
    };
    let lasting = pool.creation().lasting(Duration::from_secs(60));
    tokio::time::sleep(Duration::from_secs(59)).await;
    assert_eq!(pool.creations.load(Ordering::SeqCst), 1, "it ended by itself");
    drop(lasting);
    assert!(ended().await, "it goes on after its end");
    let _silent = pool.creation().lasting(Duration::from_millis(20));
    assert!(ended().await, "it goes on for ever");
}
