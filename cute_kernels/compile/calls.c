/* What a remembered call (again.py) asks of its tensors, without a Python object for each answer.

   describe(*tensors)                 what decides how a call is computed, as bytes; None: do not remember it
   finder(known, ...)                 find(options, *tensors): again.py's `Calls.find` of what is `known`
   computer(run, differentiable)      computed(*arguments): torch_ops.py's, by one of the two functions
   launch(kernel, rows, *arguments)   calls a compiled kernel's function as tvm_ffi does

   Tensors are read through torch's own table of C functions for DLPack, and kernels are called through
   tvm_ffi's C interface: nothing here knows how either lays its objects out.  Compiled on the machine
   where it runs (compile/extension.py), for its Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlpack/dlpack.h>
#include <stdint.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifdef Py_GIL_DISABLED
#error "a tensor's sizes are read without a lock, which the GIL stands for"
#endif

enum { MOST_ARGUMENTS = 24, MOST_DIMENSIONS = 16, ALIGNMENT = 16, NUMBER_BYTES = 512 };
/* GPU memory lies above; below, the storage is asked whether it was freed. */
#define LEAST_ADDRESS ((uintptr_t)1 << 32)

static const DLPackExchangeAPI *torch_table;
static PyTypeObject *tensor_type, *parameter_type;

/* Names of attributes, of what is looked up in a module at each call, as it may change, and of settings. */
static struct {
  PyObject *is_neg, *chandle, *requires_grad, *untyped_storage, *data_ptr;
  PyObject *is_compiling_flag, *current_level, *asked, *legacy_vmap, *mode, *in_mode, *remembers, *sharding, *get;
  PyObject *backend, *max_ctas;
} name;

/* 0, or -1 with an exception. */
static int read_tensor(PyObject *tensor, DLTensor *into) {
  return torch_table->dltensor_from_py_object_no_sync(tensor, into);
}

/* ---- describe ---- */

/* Whether the storage of a tensor has memory; 0 with an exception where torch raises. */
static int has_storage(PyObject *tensor) {
  PyObject *storage = PyObject_CallMethodNoArgs(tensor, name.untyped_storage);
  PyObject *address = storage ? PyObject_CallMethodNoArgs(storage, name.data_ptr) : NULL;
  int truth = address ? PyObject_IsTrue(address) : 0;
  Py_XDECREF(storage);
  Py_XDECREF(address);
  return truth > 0;
}

/* One tensor's words, behind `at`; NULL where a call with it is not remembered.  An exception may be set. */
static int64_t *describe_one(PyObject *tensor, int64_t *at, const int64_t *end) {
  DLTensor t;
  if (at == end) return NULL;
  if (tensor == Py_None) {
    *at++ = -1;
    return at;
  }
  /* A subclass has a say in every call. */
  if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type) return NULL;
  if (read_tensor(tensor, &t)) {
    PyErr_Clear(); /* sparse, nested and functional tensors have no such memory */
    return NULL;
  }
  /* No memory: empty, a ZeroTensor, freed for a while (a view of that is at its offset from 0). */
  uintptr_t address = (uintptr_t)t.data + t.byte_offset;
  if (t.data == NULL || address % ALIGNMENT || t.ndim > MOST_DIMENSIONS) return NULL;
  if (address < LEAST_ADDRESS && !has_storage(tensor)) return NULL;
  /* Negation that has not been done yet is not in the memory's description. */
  PyObject *negative = PyObject_CallMethodNoArgs(tensor, name.is_neg);
  if (negative == NULL) return NULL;
  Py_DECREF(negative);
  if (negative != Py_False || end - at < 3 + 2 * t.ndim) return NULL;
  *at++ = t.ndim;
  *at++ = t.dtype.code | (int64_t)t.dtype.bits << 8 | (int64_t)t.dtype.lanes << 16;
  *at++ = (int64_t)t.device.device_type << 32 | (uint32_t)t.device.device_id;
  for (int i = 0; i < t.ndim; i++) *at++ = t.shape[i];
  for (int i = 0; i < t.ndim; i++) *at++ = t.strides[i];
  return at;
}

static PyObject *describe(PyObject *self, PyObject *const *tensors, Py_ssize_t count) {
  int64_t words[MOST_ARGUMENTS * 8];
  int64_t *at = words;
  for (Py_ssize_t i = 0; i < count; i++) {
    at = describe_one(tensors[i], at, words + sizeof words / sizeof *words);
    if (at == NULL) {
      if (PyErr_Occurred()) return NULL;
      Py_RETURN_NONE;
    }
  }
  return PyBytes_FromStringAndSize((const char *)words, (char *)at - (char *)words);
}

/* ---- find ---- */

/* What again.py asks in each call, functions of torch._C; and modules, where no function tells. */
static PyObject *function_modes, *dispatch_modes, *autocast, *transforms, *key_included, *profiler, *tracing;
static PyObject *torch_compiler, *forward_ad;

/* Borrowed; NULL with an exception. */
static PyObject *look_up(PyObject *module, PyObject *what) {
  PyObject *value = PyDict_GetItemWithError(module, what);
  if (value == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, what);
  return value;
}

/* A result of `function`; `argument` may be NULL. */
static PyObject *ask(PyObject *function, PyObject *argument) {
  return argument == NULL ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
}

/* As `ask`, of a function that has a name in a module. */
static PyObject *ask_by_name(PyObject *module, PyObject *what, PyObject *argument) {
  PyObject *function = look_up(module, what);
  if (function == NULL) return NULL;
  Py_INCREF(function); /* it may be replaced while it runs */
  PyObject *answer = ask(function, argument);
  Py_DECREF(function);
  return answer;
}

/* Whether an answer, which is given away, is true: 1, 0, or -1 with an exception. */
static int is_true(PyObject *answer) {
  if (answer == NULL) return -1;
  int truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

/* Whether a mode wants to see calls, which torch.set_default_device does not; likewise. */
static int asked_by_mode(PyObject *again) {
  PyObject *modes = ask(function_modes, NULL);
  if (modes == NULL) return -1;
  int some = PyObject_IsTrue(modes);
  if (some > 0) some = is_true(ask_by_name(again, name.asked, modes));
  Py_DECREF(modes);
  return some;
}

/* Whether the key of such a name in again.py is included in this thread; likewise. */
static int includes(PyObject *again, PyObject *what) {
  PyObject *key = look_up(again, what);
  return key == NULL ? -1 : is_true(ask(key_included, key));
}

/* Whether this thread is inside of forward-mode differentiation; likewise. */
static int has_tangents(void) {
  PyObject *level = look_up(forward_ad, name.current_level);
  if (level == NULL) return -1;
  long value = PyLong_AsLong(level);
  return value == -1 && PyErr_Occurred() ? -1 : value >= 0;
}

/* Whether torch.compiler.is_compiling(): it is never scripted here, and dynamo traces no C; likewise. */
static int is_compiling(void) {
  PyObject *flag = look_up(torch_compiler, name.is_compiling_flag);
  return flag == NULL ? -1 : PyObject_IsTrue(flag);
}

/* Whether anything else than its tensors has a say in a call of this thread; likewise. */
static int is_watched(PyObject *again) {
  int said;
  if ((said = is_compiling()) || (said = asked_by_mode(again))) return said;
  PyObject *const functions[] = {dispatch_modes, autocast, transforms, profiler, tracing};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if ((said = is_true(ask(functions[i], NULL)))) return said;
  if ((said = includes(again, name.legacy_vmap)) || (said = has_tangents())) return said;
  said = includes(again, name.mode);
  return said > 0 ? is_true(ask_by_name(again, name.in_mode, NULL)) : said;
}

/* again.py's `number_bits`, appended behind `at`; NULL where there is no capacity left. */
static char *write_numbers(PyObject *options, char *at, const char *end) {
  if (PyTuple_CheckExact(options)) {
    for (Py_ssize_t i = 0; at != NULL && i < PyTuple_GET_SIZE(options); i++)
      at = write_numbers(PyTuple_GET_ITEM(options, i), at, end);
  } else if (PyFloat_Check(options)) {
    double value = PyFloat_AS_DOUBLE(options);
    if (end - at < 1 + (int)sizeof value) return NULL;
    *at++ = 'f';
    memcpy(at, &value, sizeof value);
    at += sizeof value;
  } else if (PyLong_Check(options)) {
    if (at == end) return NULL;
    *at++ = PyBool_Check(options) ? 'b' : 'i';
  }
  return at;
}

/* The key of a call in `known`, again.py's `_key` but for `remembers`; None where there is none. */
static PyObject *key_of(PyObject *data_parallel, PyObject *settings, PyObject *const *given, Py_ssize_t count) {
  if (Py_TYPE(given[1]) != tensor_type && Py_TYPE(given[1]) != parameter_type) Py_RETURN_NONE;
  int sharding = is_true(ask_by_name(data_parallel, name.sharding, NULL));
  if (sharding < 0) return NULL;
  if (sharding) Py_RETURN_NONE;
  PyObject *seen = describe(NULL, given + 1, count - 1);
  if (seen == NULL || seen == Py_None) return seen;
  char numbers[NUMBER_BYTES], *end = write_numbers(given[0], numbers, numbers + NUMBER_BYTES);
  if (end == NULL) {
    Py_DECREF(seen);
    Py_RETURN_NONE;
  }
  PyObject *bits = PyBytes_FromStringAndSize(numbers, end - numbers);
  PyObject *of_backend = bits ? ask_by_name(settings, name.get, name.backend) : NULL;
  PyObject *of_ctas = of_backend ? ask_by_name(settings, name.get, name.max_ctas) : NULL;
  PyObject *key = of_ctas ? PyTuple_Pack(5, given[0], bits, of_backend, of_ctas, seen) : NULL;
  Py_DECREF(seen);
  Py_XDECREF(bits);
  Py_XDECREF(of_backend);
  Py_XDECREF(of_ctas);
  return key;
}

/* given: options, and the call's tensors.  A call that is known was remembered for its device, which is
   in its key: `remembers` is asked of the others alone. */
static PyObject *find(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "find takes options and tensors");
    return NULL;
  }
  PyObject *known = PyTuple_GET_ITEM(self, 0), *again = PyTuple_GET_ITEM(self, 1);
  int watched = is_watched(again);
  if (watched < 0) return NULL;
  if (watched) Py_RETURN_FALSE;
  PyObject *key = key_of(PyTuple_GET_ITEM(self, 2), PyTuple_GET_ITEM(self, 3), given, count);
  if (key == NULL) return NULL;
  if (key == Py_None) {
    Py_DECREF(key);
    Py_RETURN_FALSE;
  }
  PyObject *run = PyDict_GetItemWithError(known, key);
  Py_XINCREF(run);
  Py_DECREF(key);
  if (run != NULL) return run;
  if (PyErr_Occurred()) { /* what has no hash is refused by checks */
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  int remembered = is_true(ask_by_name(again, name.remembers, given[1]));
  if (remembered < 0) return NULL;
  if (remembered) Py_RETURN_NONE;
  Py_RETURN_FALSE;
}

static PyMethodDef find_method = {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL, NULL};

/* known: the calls, by their keys; then what again, data_parallel and settings have by name. */
static PyObject *finder(PyObject *self, PyObject *dictionaries) {
  PyObject *known, *again, *data_parallel, *settings;
  if (!PyArg_ParseTuple(dictionaries, "O!O!O!O!", &PyDict_Type, &known, &PyDict_Type, &again, &PyDict_Type,
                        &data_parallel, &PyDict_Type, &settings))
    return NULL;
  return PyCFunction_New(&find_method, dictionaries);
}

/* ---- computed ---- */

static PyObject *grad_enabled, *any_requires_grad; /* functions of torch._C */

/* Whether one of the items requires a gradient: 1, 0, or -1 with an exception; 2: torch is to say. */
static int one_requires_grad(PyObject *const *items, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    PyTypeObject *type = Py_TYPE(items[i]);
    int requires = 0;
    if (type == tensor_type || type == parameter_type)
      requires = is_true(PyObject_GetAttr(items[i], name.requires_grad));
    else if (type == &PyTuple_Type || type == &PyList_Type) {
      requires = one_requires_grad(PySequence_Fast_ITEMS(items[i]), PySequence_Fast_GET_SIZE(items[i]));
      if (requires > 0) requires = 2;
    } else if (items[i] != Py_None && type != &PyUnicode_Type && type != &PyLong_Type && type != &PyFloat_Type &&
               type != &PyBool_Type)
      requires = 2;
    if (requires) return requires;
  }
  return 0;
}

/* self: what computes a call that no gradient is asked of, and one that does have to have a node. */
static PyObject *computed(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  int differentiable = is_true(PyObject_CallNoArgs(grad_enabled));
  if (differentiable > 0) differentiable = one_requires_grad(arguments, count);
  if (differentiable == 2) differentiable = is_true(PyObject_Vectorcall(any_requires_grad, arguments, count, NULL));
  if (differentiable < 0) return NULL;
  return PyObject_Vectorcall(PyTuple_GET_ITEM(self, differentiable), arguments, count, NULL);
}

static PyMethodDef computed_method = {"computed", (PyCFunction)(void (*)(void))computed, METH_FASTCALL, NULL};

static PyObject *computer(PyObject *self, PyObject *functions) {
  PyObject *run, *differentiable;
  if (!PyArg_ParseTuple(functions, "OO", &run, &differentiable)) return NULL;
  return PyCFunction_New(&computed_method, functions);
}

/* ---- launch ---- */

/* What tvm_ffi says of a call that failed, as an exception. */
static void raise_failure(void) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "a kernel's function failed and does not say why");
    return;
  }
  const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
  PyObject *kind = PyUnicode_DecodeUTF8(cell->kind.data, cell->kind.size, "replace");
  PyObject *message = PyUnicode_DecodeUTF8(cell->message.data, cell->message.size, "replace");
  if (kind && message) PyErr_Format(PyExc_RuntimeError, "%U: %U", kind, message);
  Py_XDECREF(kind);
  Py_XDECREF(message);
  TVMFFIObjectDecRef(error);
}

/* [..., D] of contiguous memory as [rows, D]; `sizes` are four words that live as long as `t`. */
static void flatten(DLTensor *t, int64_t *sizes) {
  int64_t width = t->ndim ? t->shape[t->ndim - 1] : 1, rows = 1;
  for (int i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
  sizes[0] = rows, sizes[1] = width, sizes[2] = width ? width : 1, sizes[3] = 1;
  t->ndim = 2, t->shape = sizes, t->strides = sizes + 2;
}

/* 0, or -1 with an exception. */
static int pack(PyObject *value, TVMFFIAny *into, DLTensor *tensor) {
  memset(into, 0, sizeof *into);
  if (value == Py_None) {
    into->type_index = kTVMFFINone;
  } else if (PyFloat_CheckExact(value)) {
    into->type_index = kTVMFFIFloat;
    into->v_float64 = PyFloat_AS_DOUBLE(value);
  } else if (PyLong_CheckExact(value)) {
    into->type_index = kTVMFFIInt;
    into->v_int64 = PyLong_AsLongLong(value);
    if (into->v_int64 == -1 && PyErr_Occurred()) return -1;
  } else if (PyObject_TypeCheck(value, tensor_type)) {
    if (read_tensor(value, tensor)) return -1;
    into->type_index = kTVMFFIDLTensorPtr;
    into->v_ptr = tensor;
  } else {
    PyErr_Format(PyExc_TypeError, "a kernel takes no %.100s", Py_TYPE(value)->tp_name);
    return -1;
  }
  return 0;
}

/* kernel: a tvm_ffi.Function; rows: bit i is set where argument i is taken as [rows, D]. */
static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  TVMFFIAny arguments[MOST_ARGUMENTS], result;
  DLTensor tensors[MOST_ARGUMENTS];
  int64_t sizes[MOST_ARGUMENTS][4];
  const DLTensor *first = NULL;
  void *stream = NULL, *before = NULL;
  if (count < 2 || count - 2 > MOST_ARGUMENTS) {
    PyErr_Format(PyExc_TypeError, "launch takes a function, rows and at most %d arguments", MOST_ARGUMENTS);
    return NULL;
  }
  PyObject *address = PyObject_CallMethodNoArgs(given[0], name.chandle);
  if (address == NULL) return NULL;
  void *handle = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  unsigned long rows = PyLong_AsUnsignedLong(given[1]);
  if (PyErr_Occurred()) return NULL;
  int n = (int)(count - 2);
  for (int i = 0; i < n; i++) {
    if (pack(given[i + 2], &arguments[i], &tensors[i])) return NULL;
    if (arguments[i].type_index != kTVMFFIDLTensorPtr) continue;
    if (rows >> i & 1) flatten(&tensors[i], sizes[i]);
    if (first == NULL && tensors[i].device.device_type != kDLCPU) first = &tensors[i];
  }
  if (first != NULL) {
    DLDevice device = first->device;
    if (torch_table->current_work_stream(device.device_type, device.device_id, &stream)) return NULL;
    if (TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before)) {
      raise_failure();
      return NULL;
    }
  }
  int failed;
  memset(&result, 0, sizeof result);
  Py_BEGIN_ALLOW_THREADS; /* a launch waits while the queue is full */
  failed = TVMFFIFunctionCall(handle, arguments, n, &result);
  Py_END_ALLOW_THREADS;
  if (failed) raise_failure();
  if (first != NULL && before != stream &&
      TVMFFIEnvSetStream(first->device.device_type, first->device.device_id, before, NULL) && !failed) {
    raise_failure();
    failed = 1;
  }
  if (failed) return NULL;
  Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, NULL},
    {"finder", finder, METH_VARARGS, NULL},
    {"computer", computer, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "calls", NULL, -1, methods, NULL, NULL, NULL, NULL};

/* torch's types and its table; 0, or -1 with an exception. */
static int bind_torch(void) {
  PyObject *torch = PyImport_ImportModule("torch"), *nn = PyImport_ImportModule("torch.nn");
  PyObject *tensor = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
  PyObject *parameter = nn ? PyObject_GetAttrString(nn, "Parameter") : NULL;
  PyObject *capsule = tensor ? PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__") : NULL;
  Py_XDECREF(torch);
  Py_XDECREF(nn);
  if (tensor != NULL && capsule == NULL) PyErr_SetString(PyExc_ImportError, "torch has no table of DLPack functions");
  if (capsule == NULL || parameter == NULL) return -1;
  torch_table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"); /* as long as the process */
  if (torch_table == NULL) return -1;
  if (torch_table->header.version.major != DLPACK_MAJOR_VERSION ||
      torch_table->dltensor_from_py_object_no_sync == NULL || torch_table->current_work_stream == NULL) {
    PyErr_SetString(PyExc_ImportError, "torch's table of DLPack functions is of another version");
    return -1;
  }
  tensor_type = (PyTypeObject *)tensor;
  parameter_type = (PyTypeObject *)parameter;
  return 0;
}

/* What this file asks for by name; 0, or -1 with an exception. */
static int bind_names(void) {
  const struct {
    PyObject **into;
    const char *text;
  } names[] = {
      {&name.is_neg, "is_neg"},
      {&name.untyped_storage, "untyped_storage"},
      {&name.data_ptr, "data_ptr"},
      {&name.chandle, "__chandle__"},
      {&name.requires_grad, "requires_grad"},
      {&name.is_compiling_flag, "_is_compiling_flag"},
      {&name.current_level, "_current_level"},
      {&name.asked, "_asked"},
      {&name.legacy_vmap, "LEGACY_VMAP"},
      {&name.mode, "MODE"},
      {&name.in_mode, "_in_mode"},
      {&name.remembers, "remembers"},
      {&name.sharding, "sharding"},
      {&name.get, "get"},
      {&name.backend, "BACKEND"},
      {&name.max_ctas, "MAX_CTAS"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((*names[i].into = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  return 0;
}

/* torch's functions and modules; 0, or -1 with an exception: a torch without one is of another version. */
static int bind_functions(void) {
  const struct {
    PyObject **into;
    const char *module, *text;
  } values[] = {
      {&function_modes, "torch._C", "_len_torch_function_stack"},
      {&dispatch_modes, "torch._C", "_len_torch_dispatch_stack"},
      {&autocast, "torch._C", "_is_any_autocast_enabled"},
      {&transforms, "torch._C", "_are_functorch_transforms_active"},
      {&key_included, "torch._C", "_dispatch_tls_is_dispatch_key_included"},
      {&profiler, "torch._C._autograd", "_profiler_enabled"},
      {&tracing, "torch._C", "_is_tracing"},
      {&grad_enabled, "torch._C", "is_grad_enabled"},
      {&any_requires_grad, "torch._C", "_any_requires_grad"},
      {&torch_compiler, "torch.compiler", "__dict__"},
      {&forward_ad, "torch.autograd.forward_ad", "__dict__"},
  };
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    PyObject *module = PyImport_ImportModule(values[i].module);
    *values[i].into = module ? PyObject_GetAttrString(module, values[i].text) : NULL;
    Py_XDECREF(module);
    if (*values[i].into == NULL) break;
  }
  if (!PyErr_Occurred() && look_up(torch_compiler, name.is_compiling_flag) && look_up(forward_ad, name.current_level))
    return 0;
  PyErr_SetString(PyExc_ImportError, "torch lacks a function that says who has a say in a call");
  return -1;
}

PyMODINIT_FUNC PyInit_calls(void) {
  return bind_names() || bind_torch() || bind_functions() ? NULL : PyModule_Create(&module);
}
