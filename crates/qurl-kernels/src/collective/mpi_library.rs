//! The few functions of MPI that are used, found at run time in whichever implementation the machine has.
//!
//! Three binary interfaces: the standard one of MPI 5 (`libmpi_abi`), where handles are pointers with fixed
//! values; Open MPI 4 and 5, where they are addresses of the library's own variables; MPICH 4 and what is
//! compatible with it (Intel MPI, MVAPICH), where they are fixed 32-bit numbers. A handle is passed as a
//! word: on the 64-bit machines that we run on, a function that takes an `int` looks at the lower half of its
//! register. Requests are kept in arrays, so there their size matters.
//!
//! Which file: the one that `QURL_MPI` names; else one beside the launcher that started us, so that library
//! and launcher are of one implementation; else what the loader finds.

use super::CollectiveError;
use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The variable that names the library's file.
const FILE: &str = "QURL_MPI";
/// Bytes for any text of the library.
const TEXT: usize = 8192;

/// A handle, or the number that stands for one.
type Handle = usize;

/// Whose binary interface a library has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Implementation {
    Standard,
    OpenMpi,
    Mpich,
}

/// What differs between the binary interfaces.
struct Interface {
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    /// Calls from one thread at a time.
    serialized: c_int,
    request_bytes: usize,
}

macro_rules! functions {
    ($($function:ident as $symbol:literal ($($arg:ty),*);)*) => {
        struct Functions {
            $($function: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Loaded) -> Result<Functions, String> {
                // SAFETY: the signatures are those of the standard; the library is never closed.
                unsafe {
                    $(let $function = *library
                        .get::<unsafe extern "C" fn($($arg),*) -> c_int>(concat!($symbol, "\0").as_bytes())
                        .map_err(|e| e.to_string())?;)*
                    Ok(Functions { $($function,)* })
                }
            }
        }
    };
}

functions! {
    library_version as "MPI_Get_library_version" (*mut c_char, *mut c_int);
    init as "MPI_Init_thread" (*mut c_int, *mut c_void, c_int, *mut c_int);
    finalize as "MPI_Finalize" ();
    comm_rank as "MPI_Comm_rank" (Handle, *mut c_int);
    comm_size as "MPI_Comm_size" (Handle, *mut c_int);
    set_errhandler as "MPI_Comm_set_errhandler" (Handle, Handle);
    error_string as "MPI_Error_string" (c_int, *mut c_char, *mut c_int);
    isend as "MPI_Isend" (*const c_void, c_int, Handle, c_int, c_int, Handle, *mut c_void);
    irecv as "MPI_Irecv" (*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut c_void);
    testall as "MPI_Testall" (c_int, *mut c_void, *mut c_int, *mut c_void);
}

/// An MPI library in use.
pub(super) struct Library {
    functions: Functions,
    interface: Interface,
    /// Where it was found.
    pub file: String,
    /// What it says it is.
    pub version: String,
}

impl Library {
    /// The library of the launcher that started us, or any that the machine has.
    pub fn find() -> Result<Library, CollectiveError> {
        if let Some(path) = std::env::var(FILE).ok().filter(|path| !path.is_empty()) {
            return open(&path, None).map_err(|e| unusable(format!("{FILE}={path}: {e}")));
        }
        let started_by = Implementation::of_launcher(|name| std::env::var_os(name).is_some());
        let names = names(started_by);
        let mut paths = Vec::new();
        for folder in folders() {
            paths.extend(names.iter().map(|name| folder.join(name).display().to_string()));
        }
        paths.retain(|path| Path::new(path).exists());
        paths.extend(names.iter().map(|name| name.to_string()));
        let mut reasons: Vec<String> = Vec::new();
        for path in &paths {
            match open(path, started_by) {
                Ok(library) => return Ok(library),
                Err(reason) => reasons.push(reason),
            }
        }
        let whose = match started_by {
            Some(Implementation::OpenMpi) => ", of Open MPI, whose launcher started this process",
            Some(Implementation::Mpich | Implementation::Standard) => {
                ", of MPICH or a compatible MPI, whose launcher started this process"
            }
            None => "",
        };
        let reasons = reasons.join("; ");
        Err(unusable(format!(
            "looked for {}{whose}, beside the launcher and where the loader looks ({reasons}); {FILE} may \
             name the library's file",
            names.join(", ")
        )))
    }

    /// Starts it in this process.
    pub fn init(&self) -> Result<(), CollectiveError> {
        let (wanted, mut provided) = (self.interface.serialized, 0);
        // SAFETY: without arguments, which the standard allows; the place is valid.
        let status = unsafe {
            (self.functions.init)(std::ptr::null_mut(), std::ptr::null_mut(), wanted, &mut provided)
        };
        self.done("MPI_Init_thread", status)?;
        if provided < wanted {
            let file = &self.file;
            return Err(unusable(format!("{file} was built without support for threads (level {provided})")));
        }
        // SAFETY: both are handles of the library.
        let status =
            unsafe { (self.functions.set_errhandler)(self.interface.world, self.interface.errors_return) };
        self.done("MPI_Comm_set_errhandler", status)
    }

    /// Which rank this process is, and of how many.
    pub fn place(&self) -> Result<(usize, usize), CollectiveError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the handle is the library's, the places are valid.
        unsafe {
            self.done("MPI_Comm_rank", (self.functions.comm_rank)(self.interface.world, &mut rank))?;
            self.done("MPI_Comm_size", (self.functions.comm_size)(self.interface.world, &mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    /// Stops it; all ranks do.
    pub fn finalize(&self) -> Result<(), CollectiveError> {
        // SAFETY: called once, after `init`.
        let status = unsafe { (self.functions.finalize)() };
        self.done("MPI_Finalize", status)
    }

    /// Places for so many requests.
    pub fn requests(&self, count: usize) -> Requests {
        let stride = self.interface.request_bytes;
        Requests { words: vec![0; (count * stride).div_ceil(8).max(1)], stride }
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes are there until the request is done.
    pub unsafe fn send(
        &self,
        bytes: *const u8,
        len: usize,
        to: usize,
        tag: c_int,
        request: *mut c_void,
    ) -> c_int {
        let Interface { world, byte, .. } = self.interface;
        // SAFETY: the caller's promise; the handles are the library's.
        unsafe { (self.functions.isend)(bytes.cast(), len as c_int, byte, to as c_int, tag, world, request) }
    }

    /// Begins to receive.
    ///
    /// # Safety
    /// The bytes are there, and nobody else's, until the request is done.
    pub unsafe fn receive(
        &self,
        bytes: *mut u8,
        len: usize,
        from: usize,
        tag: c_int,
        request: *mut c_void,
    ) -> c_int {
        let Interface { world, byte, .. } = self.interface;
        // SAFETY: the caller's promise; the handles are the library's.
        unsafe {
            (self.functions.irecv)(bytes.cast(), len as c_int, byte, from as c_int, tag, world, request)
        }
    }

    /// Whether all requests are done.
    ///
    /// # Safety
    /// There are so many requests and so many statuses.
    pub unsafe fn test_all(
        &self,
        count: usize,
        requests: *mut c_void,
        done: &mut c_int,
        statuses: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { (self.functions.testall)(count as c_int, requests, done, statuses) }
    }

    /// What a status means.
    pub fn error_text(&self, status: c_int) -> String {
        text(|text, len| {
            // SAFETY: memory for any text of the library.
            unsafe { (self.functions.error_string)(status, text, len) }
        })
        .unwrap_or_else(|| format!("error {status}"))
    }

    fn done(&self, what: &str, status: c_int) -> Result<(), CollectiveError> {
        match status {
            0 => Ok(()),
            status => {
                Err(CollectiveError::Failed { what: what.to_string(), reason: self.error_text(status) })
            }
        }
    }
}

/// Requests side by side, each of the library's size.
pub(super) struct Requests {
    words: Vec<u64>,
    stride: usize,
}

impl Requests {
    /// The place of a request.
    pub fn at(&mut self, index: usize) -> *mut c_void {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(index * self.stride).cast()
    }
}

impl Implementation {
    /// Whose launcher started us, by its variables.
    fn of_launcher(is_set: impl Fn(&str) -> bool) -> Option<Implementation> {
        if is_set("OMPI_COMM_WORLD_RANK") {
            Some(Implementation::OpenMpi)
        } else if is_set("PMI_RANK") {
            Some(Implementation::Mpich)
        } else {
            None
        }
    }

    /// Whether a library of this one works under a launcher of the other.
    fn fits(self, launcher: Implementation) -> bool {
        // A library with the standard interface may be of either.
        self == launcher || self == Implementation::Standard
    }
}

/// Names of the library, those of the launcher's implementation first.
fn names(started_by: Option<Implementation>) -> Vec<&'static str> {
    const STANDARD: [&str; 3] = ["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so"];
    const OPEN_MPI: [&str; 2] = ["libmpi.so.40", "libmpi.so"];
    const MPICH: [&str; 4] = ["libmpi.so.12", "libmpich.so.12", "libmpich.so", "libmpi.so"];
    let mut names = match started_by {
        Some(Implementation::OpenMpi) => [&OPEN_MPI[..], &STANDARD].concat(),
        Some(Implementation::Mpich | Implementation::Standard) => [&STANDARD[..], &MPICH].concat(),
        None => [&STANDARD[..], &OPEN_MPI, &MPICH].concat(),
    };
    let mut seen = Vec::new();
    names.retain(|name| {
        !seen.contains(name) && {
            seen.push(name);
            true
        }
    });
    names
}

/// Folders to look in before the loader's own: beside the process that started us (the launcher, or its
/// helper on this machine), then beside the launchers on the path.
fn folders() -> Vec<PathBuf> {
    let parent = std::fs::read_link(format!("/proc/{}/exe", std::os::unix::process::parent_id())).ok();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let launchers = ["mpirun", "mpiexec"];
    let on_path = std::env::split_paths(&path).flat_map(|folder| launchers.map(|name| folder.join(name)));
    let programs = parent.into_iter().chain(on_path.filter(|program| program.exists()));
    let mut folders = Vec::new();
    for program in programs {
        // A link to the real launcher, and its own place: libraries may be beside either.
        let real = program.canonicalize().ok();
        for program in std::iter::once(program).chain(real) {
            let Some(prefix) = program.parent().and_then(Path::parent) else { continue };
            for folder in ["lib", "lib64"].map(|name| prefix.join(name)) {
                if !folders.contains(&folder) {
                    folders.push(folder);
                }
            }
        }
    }
    folders
}

/// Opens a library, if it is one that fits the launcher.
fn open(path: &str, started_by: Option<Implementation>) -> Result<Library, String> {
    // SAFETY: libraries of MPI may be loaded at any time.
    let load = |flags| unsafe { Loaded::open(Some(path), flags) }.map_err(|e| e.to_string());
    let looked_at = load(RTLD_NOW | RTLD_LOCAL)?;
    let implementation = implementation(path, &looked_at).map_err(|e| format!("{path}: {e}"))?;
    if let Some(launcher) = started_by.filter(|&launcher| !implementation.fits(launcher)) {
        return Err(format!("{path} is {implementation:?}, the launcher is of {launcher:?}"));
    }
    drop(looked_at);
    // Its plug-ins look for its symbols.
    let library = load(RTLD_NOW | RTLD_GLOBAL)?;
    let interface = interface(implementation, &library).map_err(|e| format!("{path}: {e}"))?;
    let functions = Functions::load(&library).map_err(|e| format!("{path}: {e}"))?;
    std::mem::forget(library); // libraries of MPI do not survive being closed
    // SAFETY: memory for any text; it may be asked before anything else.
    let version = text(|text, len| unsafe { (functions.library_version)(text, len) }).unwrap_or_default();
    let words = version.lines().next().unwrap_or_default().split(',').next().unwrap_or_default();
    let version = words.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Library { functions, interface, file: path.to_string(), version })
}

fn implementation(path: &str, library: &Loaded) -> Result<Implementation, String> {
    // SAFETY: addresses are taken and not used.
    let has = |symbol: &[u8]| unsafe { library.get::<*const c_void>(symbol) }.is_ok();
    if !has(b"MPI_Init_thread\0") {
        return Err("it has no MPI_Init_thread".to_string());
    }
    let name = Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    if name.is_some_and(|name| name.starts_with("libmpi_abi")) {
        return Ok(Implementation::Standard);
    }
    if has(b"ompi_mpi_comm_world\0") {
        return Ok(Implementation::OpenMpi);
    }
    // SAFETY: as in `open`.
    let version = unsafe {
        library
            .get::<unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int>(b"MPI_Get_library_version\0")
            .map_err(|e| e.to_string())
            .map(|ask| text(|text, len| ask(text, len)).unwrap_or_default())?
    };
    match ["MPICH", "Intel(R) MPI", "MVAPICH"].iter().any(|known| version.contains(known)) {
        true => Ok(Implementation::Mpich),
        false => {
            let version = version.lines().next().unwrap_or_default().to_string();
            Err(format!("{version:?} is not known: expected Open MPI, MPICH or the standard interface"))
        }
    }
}

fn interface(implementation: Implementation, library: &Loaded) -> Result<Interface, String> {
    // SAFETY: addresses of variables, taken as handles and not read.
    let variable = |symbol: &str| unsafe {
        let found = library.get::<*const c_void>(symbol.as_bytes());
        found.map(|symbol| *symbol as Handle).map_err(|e| e.to_string())
    };
    Ok(match implementation {
        Implementation::Standard => Interface {
            world: 0x101,
            byte: 0x247,
            errors_return: 0x143,
            serialized: 2048,
            request_bytes: size_of::<usize>(),
        },
        Implementation::OpenMpi => Interface {
            world: variable("ompi_mpi_comm_world")?,
            byte: variable("ompi_mpi_byte")?,
            errors_return: variable("ompi_mpi_errors_return")?,
            serialized: 2,
            request_bytes: size_of::<usize>(),
        },
        Implementation::Mpich => Interface {
            world: 0x4400_0000,
            byte: 0x4c00_010d,
            errors_return: 0x5400_0001,
            serialized: 2,
            request_bytes: size_of::<c_int>(),
        },
    })
}

/// A text that the library writes; none if it does not.
fn text(ask: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> Option<String> {
    let mut text = [0 as c_char; TEXT];
    let mut len = 0;
    let status = ask(text.as_mut_ptr(), &mut len);
    text[TEXT - 1] = 0;
    // SAFETY: the text ends with a zero inside the array.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    (status == 0).then(|| text.to_string_lossy().into_owned())
}

fn unusable(reason: String) -> CollectiveError {
    CollectiveError::Library { library: "MPI".to_string(), reason }
}
