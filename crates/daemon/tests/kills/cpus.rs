//! CPUs that VMs have booked, over daemons that are killed, and CPUs of dayflyd.

use crate::guest::{self, create, start_again};
use crate::living::Living;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::client::ClientError;
use dayfly_api::types::{ErrorCode, VmLimits};
use dayfly_host::cpus::CpuList;
use dayfly_host::groups::{Controllers, Groups, Root};
use dayfly_host::process;
use dayfly_units::needs;

/// The CPUs of this host, if daemons can book some.
fn host() -> Result<Option<CpuList>> {
    let can = Groups::check(&Root::Own);
    if !needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all)) {
        return Ok(None);
    }
    let host = dayfly_host::cpus::online()?;
    if host.len() < 2 {
        eprintln!("a host with one CPU: nothing was tested");
    }
    Ok(Some(host).filter(|host| host.len() > 1))
}

/// The CPUs on which the threads of a process may run.
fn allowed(pid: u32) -> Result<CpuList> {
    Ok(allowed_by_name(pid, "no thread")?.0)
}

/// The same of the threads whose names do not begin with `name`, and of those whose do.
fn allowed_by_name(pid: u32, name: &str) -> Result<(CpuList, CpuList)> {
    let (mut others, mut named) = (CpuList::default(), CpuList::default());
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(thread?.path().join("status"))?;
        let field = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let cpus = field("Cpus_allowed_list:").context("a thread without CPUs")?.parse()?;
        let is_named = field("Name:").is_some_and(|own| own.starts_with(name));
        let all = if is_named { &mut named } else { &mut others };
        *all = all.or(&cpus);
    }
    Ok((others, named))
}

fn of(bed: &Testbed, vm: &Living) -> Result<CpuList> {
    allowed(bed.processes().get(&vm.id).context("a VM without a VMM")?.pid)
}

/// The CPUs that the API shows.
async fn shown(bed: &Testbed, vm: &Living) -> Result<CpuList> {
    Ok(bed.client.vm(&vm.word()).await?.cpus.into_iter().collect())
}

fn booked(cpus: usize) -> VmLimits {
    VmLimits { cpus_booked: u32::try_from(cpus).ok(), ..VmLimits::default() }
}

/// Checks that `tried` was refused with this code.
fn refused<T>(tried: Result<T>, code: ErrorCode) -> Result<String> {
    let error = tried.err().context("not refused")?;
    let refused = error.downcast_ref::<ClientError>().context("another error")?;
    ensure!(refused.code() == Some(code), "{refused:?}");
    Ok(refused.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_keeps_its_cpus_alone_over_daemons_until_it_ends() -> Result<()> {
    let Some(host) = host()? else { return Ok(()) };
    let mut bed = guest::testbed().await?;
    let other = Living::new(create(&bed, "other").await?, &bed)?;
    ensure!(of(&bed, &other)? == host);
    let most = host.len() - 1;
    let many = guest::create_limited(&bed, "many", booked(host.len())).await;
    let message = refused(many, ErrorCode::Invalid)?;
    ensure!(message.contains("cpus_booked: expected at least 1"), "{message}");
    let vm = Living::new(guest::create_limited(&bed, "booked", booked(most)).await?, &bed)?;
    let own = shown(&bed, &vm).await?;
    ensure!(own.len() == most && of(&bed, &vm)? == own, "{own}");
    let rest = host.without(&own);
    ensure!(of(&bed, &other)? == rest && shown(&bed, &other).await?.is_empty());
    let late = Living::new(create(&bed, "late").await?, &bed)?;
    ensure!(of(&bed, &late)? == rest);
    // Another VM gets none of them, and neither does a clone, which books its own.
    let message =
        refused(guest::create_limited(&bed, "more", booked(1)).await, ErrorCode::Exhausted)?;
    ensure!(message.contains("expected at most 0"), "{message}");
    let fork = serde_json::from_str("{}")?;
    let forked = bed.client.fork(&vm.word(), &fork).await.map_err(Into::into);
    let message = refused(forked, ErrorCode::Exhausted)?;
    ensure!(message.contains("the VM that is forked"), "{message}");

    for _ in 0..2 {
        bed.kill()?;
        ensure!(of(&bed, &vm)? == own && of(&bed, &other)? == rest);
        bed.start().await?;
        vm.runs_on(&bed).await?;
        other.runs_on(&bed).await?;
        ensure!(shown(&bed, &vm).await? == own && of(&bed, &vm)? == own);
        ensure!(of(&bed, &other)? == rest && of(&bed, &late)? == rest);
        refused(guest::create_limited(&bed, "more", booked(1)).await, ErrorCode::Exhausted)?;
    }
    // A record that no daemon reads gives no CPU away.
    bed.kill()?;
    let record = bed.of_vm(vm.id, "vm.json");
    let kept = std::fs::read(&record)?;
    std::fs::write(&record, "{")?;
    bed.start().await?;
    refused(guest::create_limited(&bed, "more", booked(1)).await, ErrorCode::Exhausted)?;
    ensure!(of(&bed, &vm)? == own);
    bed.kill()?;
    std::fs::write(&record, kept)?;
    bed.start().await?;
    vm.runs_on(&bed).await?;

    // At its end all get them back, and it books anew when it is started again.
    bed.client.kill(&vm.word()).await?;
    ensure!(of(&bed, &other)? == host && shown(&bed, &vm).await?.is_empty());
    let next = guest::create_limited(&bed, "next", booked(1)).await?;
    let next = Living::new(next, &bed)?;
    ensure!(of(&bed, &next)?.len() == 1);
    if most == 1 {
        let started = bed.client.start(&vm.word()).await.map_err(Into::into);
        refused(started, ErrorCode::Exhausted)?;
    }
    bed.client.remove_vm(&next.word(), true).await?;
    start_again(&bed, vm.id).await?;
    let vm = Living::new(vm.listed(&bed).await?, &bed)?;
    ensure!(shown(&bed, &vm).await? == of(&bed, &vm)? && of(&bed, &vm)?.len() == most);
    ensure!(of(&bed, &other)?.and(&of(&bed, &vm)?).is_empty());

    // A VM that ends while there is no daemon.
    let process = *bed.processes().get(&vm.id).context("a VMM")?;
    bed.kill()?;
    process::Process::open(process)?.context("its process")?.kill()?;
    until("its VMM has ended", async || Ok(!bed.processes().contains_key(&vm.id))).await?;
    bed.start().await?;
    ensure!(of(&bed, &other)? == host);
    let last = guest::create_limited(&bed, "last", booked(most)).await?;
    bed.client.remove_vm(&last.id.to_string(), true).await?;
    for vm in [&other, &late] {
        bed.client.remove_vm(&vm.word(), true).await?;
    }
    ensure!(bed.client.leaks().await?.is_empty());
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn vmms_that_wait_in_the_pool_come_off_booked_cpus() -> Result<()> {
    let Some(host) = host()? else { return Ok(()) };
    let mut bed = Testbed::new()?;
    bed.pool = "4";
    guest::store(&bed, guest::GUEST, 'c')?;
    bed.start().await?;
    guest::base(&bed, guest::GUEST, guest::BASE).await?;
    // So that VMMs wait, which were forked before the first booking.
    let first = create(&bed, "first").await?;
    let waiting = |bed: &Testbed| bed.processes().len();
    until("VMMs wait", async || Ok(waiting(&bed) > 1)).await?;
    let vm = guest::create_limited(&bed, "booked", booked(host.len() - 1)).await?;
    let own = shown(&bed, &Living::new(vm.clone(), &bed)?).await?;
    for (id, process) in bed.processes() {
        // A VMM may end meanwhile.
        let Ok(cpus) = allowed(process.pid) else { continue };
        let expected = if id == vm.id { own.clone() } else { host.without(&own) };
        ensure!(cpus == expected, "{id}: expected {expected}, got {cpus}");
    }
    // The daemon is killed when the VM is recorded, and no client knows it.
    bed.client.remove_vm(&vm.id.to_string(), true).await?;
    bed.arm("daemon.create.recorded")?;
    let _killed = guest::create_limited(&bed, "lost", booked(1)).await;
    bed.died()?;
    bed.start().await?;
    bed.client.remove_vm("lost", true).await?;
    until("its CPUs are free", async || {
        match guest::create_limited(&bed, "all", booked(host.len() - 1)).await {
            Ok(vm) => {
                bed.client.remove_vm(&vm.id.to_string(), true).await?;
                Ok(true)
            }
            Err(_) => Ok(false),
        }
    })
    .await?;
    bed.client.remove_vm(&first.id.to_string(), true).await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn dayflyd_and_vms_have_different_cpus() -> Result<()> {
    let Some(host) = host()? else { return Ok(()) };
    // A VM of a daemon without the option comes off the CPUs with the next daemon.
    let mut bed = guest::testbed().await?;
    let old = Living::new(create(&bed, "old").await?, &bed)?;
    bed.kill()?;
    let first = host.iter().next().context("a CPU")?;
    let main: CpuList = [first].into_iter().collect();
    bed.options = vec!["--main-cpus", Box::leak(first.to_string().into_boxed_str())];
    bed.start().await?;
    old.runs_on(&bed).await?;
    let vm = Living::new(create(&bed, "new").await?, &bed)?;
    vm.runs_on(&bed).await?;
    let of_vms = host.without(&main);
    ensure!(of(&bed, &old)? == of_vms && of(&bed, &vm)? == of_vms);
    // The memory of VMs that end is not freed on dayflyd's CPUs.
    let (others, reapers) = allowed_by_name(bed.pid()?, "reaper")?;
    ensure!(others == main, "{others}");
    ensure!(reapers == of_vms, "{reapers}");
    // A zygote has no VM in its command line.
    let vmms: Vec<u32> = bed.processes().values().map(|process| process.pid).collect();
    let (mut zygotes, mut preforked) = (0, 0);
    for pid in process::named(&[bed.run().join("dayfly-vmm")])? {
        match allowed(pid)? {
            cpus if cpus == main && !vmms.contains(&pid) => zygotes += 1,
            cpus if cpus == of_vms => preforked += 1,
            cpus => anyhow::bail!("process {pid}: got {cpus}"),
        }
    }
    ensure!(zygotes == dayfly_host::numa::nodes()?.len() && preforked >= vmms.len());
    let message = refused(
        guest::create_limited(&bed, "many", booked(of_vms.len())).await,
        ErrorCode::Invalid,
    )?;
    ensure!(message.contains("1 of them are dayflyd's"), "{message}");
    // Without the option, VMs have all CPUs again: also one that was forked by a zygote with less.
    bed.kill()?;
    bed.options.clear();
    bed.start().await?;
    for vm in [&old, &vm] {
        vm.runs_on(&bed).await?;
        ensure!(of(&bed, vm)? == host, "{}", of(&bed, vm)?);
        bed.client.remove_vm(&vm.word(), true).await?;
    }
    bed.stop()?;
    // A daemon that cannot keep VMs off does not start, and says why.
    bed.options = vec!["--main-cpus", "8191"];
    ensure!(bed.start().await.is_err());
    ensure!(bed.log().contains("--main-cpus: expected CPUs of this host"), "{}", bed.log());
    Ok(())
}
