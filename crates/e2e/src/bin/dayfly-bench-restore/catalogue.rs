//! What is restored: services that are asked, a program that starts, and the six workloads of the store's benchmark, each taken in the middle.

use dayfly_e2e::bench::images::Set;
use dayfly_e2e::bench::scripts::{LATER, WORKLOADS, Workload};

/// A snapshot, and what its clones do.
#[derive(Debug, Clone, Copy)]
pub struct Subject {
    /// Its name.
    pub name: &'static str,
    /// In words.
    pub what: &'static str,
    /// Its image.
    pub set: &'static Set,
    /// Size of its disk.
    pub disk: &'static str,
    /// Somebody waits for it: 80 % of a second are wanted, not 50 ("Efficiently Restoring Virtual Machines", section 5.2).
    pub interactive: bool,
    /// What runs before the snapshot.
    pub begin: Begin,
    /// What a clone runs: a text for /bin/sh, with the number of the run as `$1`.
    pub run: &'static str,
}

/// What runs before the snapshot.
#[derive(Debug, Clone, Copy)]
pub enum Begin {
    /// A text for /bin/sh.
    Text(&'static str),
    /// One of the workloads, for so many seconds; it goes on in the clones.
    Middle(Workload, u32),
}

impl Begin {
    /// The text for /bin/sh, and its words.
    pub fn text(self) -> (&'static str, Vec<String>) {
        match self {
            Self::Text(text) => (text, Vec::new()),
            Self::Middle(workload, seconds) => {
                let script = workload.script();
                (LATER, vec![script.run.to_owned(), script.late.to_owned(), seconds.to_string()])
            }
        }
    }
}

/// What writes the client to /srv: it asks for COUNT pages over HTTP, PORT SEED COUNT BELOW PATH, with a number below BELOW in PATH; small numbers are asked for often.
macro_rules! client {
    () => {
        r#"cat >/srv/client.py <<'END'
import http.client, random, sys
port, seed, count, below, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
random.seed(seed)
got = 0
connection = http.client.HTTPConnection("127.0.0.1", port)
for n in range(count):
    number = n if seed == "all" else int(below * random.random() ** 3)
    connection.request("GET", path % number)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    got += len(answer.read())
    if answer.will_close:
        connection.close()
print(got)
END
"#
    };
}

const OLAP: Set = Set::prepared(
    "olap",
    "sqlite3",
    r#"sqlite3 /srv/olap.db <<'END'
pragma page_size = 4096;
create table part (id integer primary key, brand text, size integer);
create table line (id integer primary key, part integer, shipped integer, quantity integer, price real, discount real, mode text, comment text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 10000)
  insert into part select i, 'brand ' || (i % 25), abs(random()) % 50 from n;
with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000)
  insert into line select i, abs(random()) % 10000 + 1, i / 80, abs(random()) % 50, abs(random()) % 100000 / 100.0, abs(random()) % 11 / 100.0,
    substr('airrailshipmailfob ', abs(random()) % 5 * 4 + 1, 4), hex(randomblob(90)) from n;
create index shipped on line (shipped);
create index of_part on line (part);
analyze;
END
cat >/srv/olap.sh <<'END'
from=$(( ($1 * 613 + 200) % 2000 ))
sqlite3 /srv/olap.db <<SQL
select mode, sum(quantity), sum(price), avg(discount), count(*) from line where shipped between $from and $from + 300 group by mode order by mode;
select sum(price * discount) from line where shipped between $from and $from + 200 and discount between 0.05 and 0.07 and quantity < 24;
select brand, count(*), avg(price) from line join part on part.id = line.part where part.brand = 'brand $(( $1 % 25 ))' and line.quantity > 40 group by brand;
select shipped / 100, count(*), max(price) from line group by 1 order by 3 desc limit 10;
SQL
END"#,
);

const STATIC: Set = Set::prepared(
    "static",
    "nginx-light python3",
    concat!(
        client!(),
        "mkdir -p /var/www/html/f
for n in $(seq 0 299); do head -c $(( (n * 7919 % 61 + 1) * 3000 )) /dev/urandom | base64 >/var/www/html/f/$n.html; done"
    ),
);

const DYNAMIC: Set = Set::prepared(
    "dynamic",
    "php-cli php-sqlite3 sqlite3 python3",
    concat!(
        client!(),
        r#"sqlite3 /srv/shop.db <<'END'
create table product (id integer primary key, category integer, name text, price real, about text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 40000)
  insert into product select i, i % 400, hex(randomblob(8)), abs(random()) % 10000 / 100.0, hex(randomblob(120)) from n;
create index of_category on product (category, price);
END
cat >/srv/app.php <<'END'
<?php
$db = new SQLite3('/srv/shop.db', SQLITE3_OPEN_READONLY);
$category = (int) ($_GET['category'] ?? 0);
$rows = [];
$found = $db->query("select id, name, price, about from product where category = $category order by price limit 40");
while ($row = $found->fetchArray(SQLITE3_ASSOC)) { $rows[] = $row; }
echo "<html><head><title>" . htmlspecialchars("Category $category") . "</title></head><body><ul>";
foreach ($rows as $row) {
    echo "<li>", htmlspecialchars($row['name']), ": ", number_format($row['price'], 2), " ", substr(md5($row['about']), 0, 12),
        " ", htmlspecialchars(strrev(substr($row['about'], 0, 40))), "</li>\n";
}
echo "</ul>", json_encode(array_slice($rows, 0, 5)), "</body></html>";
END"#
    ),
);

const NUMPY: Set = Set::prepared(
    "numpy",
    "python3 python3-numpy",
    r#"cat >/srv/job.py <<'END'
import sys, json, csv, sqlite3, decimal, hashlib, http.client, xml.etree.ElementTree
import numpy
seed = int(sys.argv[1])
values = numpy.random.default_rng(seed).normal(size=(60, 60))
print(json.dumps({"trace": float(numpy.trace(values @ values.T)), "median": float(numpy.median(values))}))
END"#,
);

const fn middle(name: &'static str, what: &'static str, interactive: bool, workload: Workload) -> Subject {
    let begin = Begin::Middle(workload, 75);
    Subject { name, what, set: &WORKLOADS, disk: "3G", interactive, begin, run: "exec sleep 20" }
}

/// All of them.
pub const SUBJECTS: [Subject; 10] = [
    Subject {
        name: "numpy",
        what: "python3 starts and imports numpy and nine modules",
        set: &NUMPY,
        disk: "1G",
        interactive: true,
        begin: Begin::Text("python3 /srv/job.py 100 && python3 /srv/job.py 101"),
        run: "python3 /srv/job.py $1",
    },
    Subject {
        name: "static",
        what: "nginx with 300 files of 4 to 250 KB, of which a client gets 150",
        set: &STATIC,
        disk: "1G",
        interactive: true,
        begin: Begin::Text("nginx && python3 /srv/client.py 80 all 300 300 /f/%d.html"),
        run: "python3 /srv/client.py 80 $1 150 300 /f/%d.html",
    },
    Subject {
        name: "dynamic",
        what: "PHP and SQLite make pages of 40,000 products, 60 of 400 categories",
        set: &DYNAMIC,
        disk: "1G",
        interactive: true,
        begin: Begin::Text(
            "(setsid php -S 127.0.0.1:8000 /srv/app.php >/dev/null 2>&1 </dev/null &) && sleep 3 && python3 /srv/client.py 8000 all 400 400 '/?category=%d'",
        ),
        run: "python3 /srv/client.py 8000 $1 60 400 '/?category=%d'",
    },
    Subject {
        name: "olap",
        what: "four queries over 200,000 lines in SQLite, their ranges different in each run",
        set: &OLAP,
        disk: "1G",
        interactive: true,
        begin: Begin::Text("sh /srv/olap.sh 100 && cat /srv/olap.db >/dev/null"),
        run: "sh /srv/olap.sh $1",
    },
    middle("desktop", "windows that nobody touches", true, Workload::Desktop),
    middle("make", "a C project is compiled", false, Workload::Make),
    middle("media", "a media file is played", true, Workload::Media),
    middle("copy", "a file of 512 MiB is copied", false, Workload::Copy),
    middle("gzip", "a file of 512 MiB is compressed", false, Workload::Gzip),
    middle("postmark", "mails are written, read and removed", false, Workload::Postmark),
];

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::Name;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_names_and_each_is_there_once() {
        let names: BTreeSet<&str> = SUBJECTS.iter().map(|subject| subject.name).collect();
        assert_eq!(names.len(), SUBJECTS.len());
        names.iter().for_each(|name| drop(name.parse::<Name>().expect("a name")));
    }
}
