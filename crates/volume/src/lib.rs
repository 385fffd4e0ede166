//! # volume
//!
//! A file server for one folder of the host that is shared with one guest. It speaks the protocol
//! of /dev/fuse over a stream, so the guest needs no driver but FUSE. It runs as the caller that
//! shares the folder, in a jail of which the folder is the root ([`jail`]).
//!
//! ```text
//! program ─▶ guest's kernel ─▶ /dev/fuse ─▶ relay ─▶ vsock ─▶ stream ─▶ dayfly-volume ─▶ folder
//! └────────────────────────── guest ───────────────┘          └──────────── host ──────────────┘
//! ```
//!
//! # The program
//!
//! ```text
//! dayfly-volume --stream FD (--folder FD | --path PATH) [--uid N --gid N [--groups N,N,...]]
//!               [--read-only]
//! ```
//!
//! | argument | meaning |
//! |---|---|
//! | `--stream FD` | inherited descriptor above 2 of a connected stream socket |
//! | `--folder FD` | inherited descriptor above 2 of the folder, O_PATH or O_RDONLY |
//! | `--path PATH` | instead: an absolute path, opened with the caller's rights |
//! | `--uid`, `--gid`, `--groups` | the caller's ids; required if the program runs as root |
//! | `--read-only` | every change fails with EROFS |
//!
//! A path is opened without capabilities, so a caller can share only what it reaches itself.
//!
//! The program makes its namespaces itself. When it serves, it writes `ready` and a line feed to
//! stdout. It ends with the stream, with status 0. A refusal, or a guest that breaks the protocol,
//! is status 1 and a line on stderr. A call outside of the filter is SIGSYS. It keeps no state: any
//! signal may end it at any time.
//!
//! # The stream
//!
//! Both directions carry messages of linux/fuse.h, back to back. The first four bytes of a message
//! are its length, header included: 40 bytes to 1 MiB + 4096 from the guest, 16 bytes to 1 MiB + 16
//! from the server. The guest's kernel speaks FUSE 7.31 (Linux 5.4) or newer. The relay
//!
//! 1. mounts with `rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions`, `nosuid`
//!    and `nodev`;
//! 2. reads /dev/fuse with room for 1 MiB + 4096 bytes, and writes each answer with one write(2);
//! 3. reads the stream also while a request waits to be sent: the server stops reading while its
//!    answers are not read;
//! 4. ignores ENOENT and EINVAL of writes: the request was given up;
//! 5. closes /dev/fuse when the stream ends: the guest's programs get ENOTCONN.
//!
//! The server sends no notifications. A guest that knows more files than the server has descriptors
//! for need not forget any: the server closes them and opens them again ([`nodes`]).
//!
//! # What bounds a guest
//!
//! | | bound | past it |
//! |---|---|---|
//! | files that the server knows | [`options::MAX_NODES`] | the guest looks the oldest up again |
//! | descriptors of them | [`options::MAX_OPEN_NODES`], or what RLIMIT_NOFILE allows | closed |
//! | files that it has open | [`options::MAX_HANDLES`] | ENFILE |
//! | bytes of a message, a read or a write | 1 MiB | EINVAL; the server ends |
//! | bytes of a part of a folder | 128 KiB | the guest asks again |
//! | bytes of one copy | 32 MiB | the guest asks again |
//! | operations at once, and waiting | [`serve::WORKERS`]; 64, or 4 MiB | the stream stops |
//!
//! Names are one component. A name is resolved in its folder's O_PATH descriptor by openat2(2): no
//! link is followed, no other file system entered. Only regular files and folders are opened.
//! `docs/volumes.md` says what users of volumes may expect.
//!
//! | module | concern |
//! |---|---|
//! | [`wire`], [`message`] | the protocol; messages and answers |
//! | [`owner`], [`attr`] | owners and attributes as the guest sees them |
//! | [`nodes`], [`handles`] | what the guest knows, and has open |
//! | [`own`] | the server's descriptors by name |
//! | [`ops`], [`options`] | the operations; what is served, and bounds |
//! | [`serve`](mod@serve) | the stream and the threads |
//! | [`arguments`], [`start`], [`jail`], [`filter`] | the program, its jail, its system calls |
//!
//! This crate knows nothing about VMs, vsock, mounts of the guest, or names of volumes.

pub mod arguments;
pub mod attr;
pub mod filter;
#[doc(hidden)]
pub mod fuzzing;
pub mod handles;
pub mod jail;
pub mod message;
pub mod nodes;
pub mod ops;
pub mod options;
pub mod own;
pub mod owner;
pub mod serve;
pub mod start;
pub mod wire;

pub use options::{Options, StartError};
pub use serve::{ServeError, serve};
