use super::*;
use crate::fixture;
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use dayfly_store::Store;

#[test]
fn an_agent_of_a_version_before_is_refused_with_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config, templates, fixture::nodes());
    let name = Some("web".parse().unwrap());
    let vm =
        daemon.registry.reserve(&daemon.config, name, fixture::facts(), fixture::memory(), None);
    let vm = vm.unwrap();
    for (version, fits) in [("0.1.0", false), ("0.1.0+1", true), ("0.2.0+2", true), ("", false)] {
        vm.update(|live| version.clone_into(&mut live.agent_version));
        let needed = needs(&vm, IDS, "listing programs");
        assert_eq!(needed.is_ok(), fits, "{version}");
        if let Err(error) = needed {
            assert_eq!(error.0.code, ErrorCode::State);
            assert!(error.0.message.contains("bake its snapshot anew"), "{error}");
        }
    }
}
