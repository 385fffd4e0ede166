//! Builds artefacts by hand: root disks and kernels, as the CLI builds them.

use dayfly_image::{BuildOptions, Debian, Size, Source, build, kernel};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

const USAGE: &str = "image debian SUITE PACKAGES(,-separated or '') OUT [SIZE]
image from PATH[@IMAGE] OUT [SIZE]
image kernel 6.12|6.1|TREE AGENT OUT
The cache is $DAYFLY_CACHE or ~/.cache/dayfly.";

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let began = Instant::now();
    match args[..] {
        ["debian", suite, packages, out, ref size @ ..] => {
            let include =
                packages.split(',').filter(|p| !p.is_empty()).map(str::to_owned).collect();
            let debian = Debian { suite: suite.to_owned(), include, refresh: false };
            image(&Source::Debian(debian), out, size)?;
        }
        ["from", path, out, ref size @ ..] => {
            let (path, name) =
                path.split_once('@').map_or((path, None), |(p, n)| (p, Some(n.to_owned())));
            image(&Source::detect(Path::new(path), name)?, out, size)?;
        }
        ["kernel", version, agent, out] => {
            let tree = if Path::new(version).is_dir() {
                PathBuf::from(version)
            } else {
                kernel::fetch_debian(version, None)?.folder
            };
            let source = kernel::KernelSource::in_tree(&tree)?;
            let built = kernel::build(&source, Path::new(agent), None, Path::new(out))?;
            println!("cached {}\n{:#?}", built.cached, built.manifest);
        }
        _ => return Err(USAGE.into()),
    }
    println!("{:.3} s", began.elapsed().as_secs_f64());
    Ok(())
}

fn image(source: &Source, out: &str, size: &[&str]) -> Result<(), Box<dyn Error>> {
    let size = size.first().map(|s| s.parse()).transpose()?.map_or(Size::Auto, Size::Total);
    let options = BuildOptions { size, ..BuildOptions::default() };
    let built =
        build(source, &options, Path::new(out), &mut |p| println!("{} {}", p.step, p.done_bytes))?;
    println!("cached {}\n{:#?}", built.cached, built.manifest);
    Ok(())
}
