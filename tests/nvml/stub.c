/* A stand-in for the driver's libnvidia-ml.so.1 that answers from a text file, which it reads on every call.

   The environment variable NVML_STUB_STATE names the file. It holds lines `key value`:

       driver 580.95.05             the driver's version
       cuda 13000                   the newest CUDA that the driver's library runs
       cards 2                      the number of cards; card N's keys begin with `N.`
       0.uuid GPU-a                 also name, memory_total, memory_used, utilization, reasons, sm_clock, memory_clock
                                    (MHz), temperature (C), power and power_limit (mW), energy (mJ), mig (0 or 1)
       0.capability 9 0             compute capability
       0.memory_reserved 1000       what the driver holds; only the first version of the query counts it as used
       0.mig.1.uuid MIG-b           an instance; also name, memory_total, memory_used, memory_reserved, processes, slices
       0.processes 4711 4712        pids; the key alone means none
       process.4711 /usr/bin/x      the name of a process
       0.samples 9:4711:97          use of the SMs: timestamp, pid and per cent of each sample; the key alone means none
       fail.SYMBOL 999              error code that SYMBOL returns; fail.* stands for all symbols
       0.fail.SYMBOL 15             the same for one card

   Where a file NVML_STUB_STATE.opened is, it grows by a byte each time that a process opens NVML.
   Keys that are missing from the file are not supported. Without the file there is no driver. Calls outside of init and
   shutdown fail.
   Numbers, structures and symbols are those of NVIDIA's nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, VERSION_MISMATCH = 25, UNKNOWN = 999
};
enum { CLOCK_SM = 1, CLOCK_MEM = 2 };
enum { LINE = 4096 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
        sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    u64 memorySizeMB;
} nvmlDeviceAttributes_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned pid; u64 usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { unsigned pid; u64 timeStamp; unsigned smUtil, memUtil, encUtil, decUtil; } nvmlProcessUtilizationSample_t;
/* A handle is the card's index plus one: never NULL, and valid even after the file has changed. */
typedef struct nvmlDevice_st *nvmlDevice_t;

static int users = 0;

/* That of an instance adds INSTANCE times the instance's index plus one. */
enum { INSTANCE = 256, INSTANCES = 7 };

static nvmlDevice_t handle(unsigned card, unsigned instances) {
    return (nvmlDevice_t)(unsigned long)(card + 1 + INSTANCE * instances);
}

static unsigned card_of(nvmlDevice_t device) { return (unsigned)((unsigned long)device % INSTANCE) - 1; }
static unsigned instance_of(nvmlDevice_t device) { return (unsigned)((unsigned long)device / INSTANCE) - 1; }
static int is_instance(nvmlDevice_t device) { return (unsigned long)device >= INSTANCE; }

/* Read the value of `key` in the state file; return 0 if there is no such line or no file. */
static int state(const char *key, char value[LINE]) {
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    size_t length = strlen(key);
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, length) && (line[length] == ' ' || line[length] == 0)) {
            strcpy(value, line + length + (line[length] == ' '));
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

static int card_state(nvmlDevice_t card, const char *key, char value[LINE]) {
    char full[256];
    if (is_instance(card)) snprintf(full, sizeof full, "%u.mig.%u.%s", card_of(card), instance_of(card), key);
    else snprintf(full, sizeof full, "%u.%s", card_of(card), key);
    return state(full, value);
}

/* Return the error code that `symbol` must fail with, for all cards or for this one. */
static int failure(const char *symbol, nvmlDevice_t card) {
    char key[256], value[LINE];
    snprintf(key, sizeof key, "fail.%s", symbol);
    if (state("fail.*", value) || state(key, value) || (card && card_state(card, key, value))) return atoi(value);
    return SUCCESS;
}

static int ready(const char *symbol, nvmlDevice_t card) { return users ? failure(symbol, card) : UNINITIALIZED; }

static int number(const char *symbol, nvmlDevice_t card, const char *key, u64 *answer) {
    char value[LINE];
    int code = ready(symbol, card);
    if (code) return code;
    if (!card_state(card, key, value)) return NOT_SUPPORTED;
    *answer = strtoull(value, NULL, 0);
    return SUCCESS;
}

static int number32(const char *symbol, nvmlDevice_t card, const char *key, unsigned *answer) {
    u64 wide = 0;
    int code = number(symbol, card, key, &wide);
    if (!code) *answer = (unsigned)wide;
    return code;
}

static int copy(const char *value, char *text, unsigned size) {
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(text, value);
    return SUCCESS;
}

static unsigned cards(void) {
    char value[LINE];
    return state("cards", value) ? (unsigned)atoi(value) : 0;
}

/* Add a byte to the file beside the state file, as long as there is one: the number of times that a process opened NVML. */
static void note_opening(const char *path) {
    char beside[LINE];
    snprintf(beside, sizeof beside, "%s.opened", path);
    FILE *file = fopen(beside, "r+");
    if (!file) return;
    fseek(file, 0, SEEK_END);
    fputc('.', file);
    fclose(file);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    fclose(file);
    int code = failure(__func__, NULL);
    if (!code && !users++) note_opening(path);
    return code;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    char value[LINE];
    int code = ready(__func__, NULL);
    if (code) return code;
    return state("driver", value) ? copy(value, text, size) : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    char value[LINE];
    int code = ready(__func__, NULL);
    if (code) return code;
    if (!state("cuda", value)) return FUNCTION_NOT_FOUND;
    *version = atoi(value);
    return SUCCESS;
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    char key[LINE], value[LINE];
    int code = ready(__func__, NULL);
    if (code) return code;
    snprintf(key, sizeof key, "process.%u", pid);
    return state(key, value) ? copy(value, name, size) : NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = ready(__func__, NULL);
    if (!code) *count = cards();
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *card) {
    if (users && index >= cards()) return INVALID_ARGUMENT;
    *card = handle(index, 0);
    return ready(__func__, *card);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *card) {
    char value[LINE];
    for (unsigned index = 0; users && index < cards(); index++)
        for (unsigned instance = 0; instance <= INSTANCES; instance++) {
            nvmlDevice_t candidate = handle(index, instance);
            if (card_state(candidate, "uuid", value) && !strcmp(value, uuid)) {
                *card = candidate;
                return ready(__func__, candidate);
            }
        }
    int code = ready(__func__, NULL);
    return code ? code : NOT_FOUND;
}

static int name(const char *symbol, nvmlDevice_t card, const char *key, char *text, unsigned size) {
    char value[LINE];
    int code = ready(symbol, card);
    if (code) return code;
    return card_state(card, key, value) ? copy(value, text, size) : NOT_SUPPORTED;
}

int nvmlDeviceGetUUID(nvmlDevice_t card, char *text, unsigned size) { return name(__func__, card, "uuid", text, size); }
int nvmlDeviceGetName(nvmlDevice_t card, char *text, unsigned size) { return name(__func__, card, "name", text, size); }

int nvmlDeviceGetMemoryInfo(nvmlDevice_t card, nvmlMemory_t *memory) {
    u64 reserved = 0;
    int code = number(__func__, card, "memory_total", &memory->total);
    if (!code) code = number(__func__, card, "memory_used", &memory->used);
    if (!code) number(__func__, card, "memory_reserved", &reserved);
    if (!code) memory->used += reserved;
    if (!code) memory->free = memory->total - memory->used;
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t card, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof *memory | 2 << 24)) return VERSION_MISMATCH;
    memory->reserved = 0;
    int code = number(__func__, card, "memory_total", &memory->total);
    if (!code) code = number(__func__, card, "memory_used", &memory->used);
    if (!code) number(__func__, card, "memory_reserved", &memory->reserved);
    if (!code) memory->free = memory->total - memory->used - memory->reserved;
    return code;
}

int nvmlDeviceGetUtilizationRates(nvmlDevice_t card, nvmlUtilization_t *rates) {
    rates->memory = 0;
    return number32(__func__, card, "utilization", &rates->gpu);
}

int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t card, unsigned *count, nvmlProcessInfo_t *list) {
    char value[LINE];
    unsigned room = *count, found = 0;
    int code = ready(__func__, card);
    if (code) return code;
    if (!card_state(card, "processes", value)) return NOT_SUPPORTED;
    for (char *pid = strtok(value, " "); pid; pid = strtok(NULL, " "), found++)
        if (list && found < room) list[found] = (nvmlProcessInfo_t){(unsigned)atoi(pid), 1 << 20, -1u, -1u};
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* A call without room for samples tells how much is needed. */
int nvmlDeviceGetProcessUtilization(
    nvmlDevice_t card, nvmlProcessUtilizationSample_t *list, unsigned *count, u64 seen
) {
    char value[LINE];
    unsigned room = list ? *count : 0, found = 0, pid, percent;
    u64 time;
    int code = ready(__func__, card);
    if (code) return code;
    if (!card_state(card, "samples", value)) return NOT_SUPPORTED;
    for (char *sample = strtok(value, " "); sample; sample = strtok(NULL, " ")) {
        if (sscanf(sample, "%llu:%u:%u", &time, &pid, &percent) != 3 || time <= seen) continue;
        if (found < room) list[found] = (nvmlProcessUtilizationSample_t){pid, time, percent, 0, 0, 0};
        found++;
    }
    *count = found;
    if (!found) return NOT_FOUND;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t card, u64 *reasons) {
    return number(__func__, card, "reasons", reasons);
}

/* The older name of the same function. */
int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t card, u64 *reasons) {
    return number(__func__, card, "reasons", reasons);
}

int nvmlDeviceGetClockInfo(nvmlDevice_t card, int kind, unsigned *mhz) {
    if (kind != CLOCK_SM && kind != CLOCK_MEM) return users ? INVALID_ARGUMENT : UNINITIALIZED;
    return number32(__func__, card, kind == CLOCK_SM ? "sm_clock" : "memory_clock", mhz);
}

int nvmlDeviceGetTemperature(nvmlDevice_t card, int sensor, unsigned *celsius) {
    if (sensor) return users ? INVALID_ARGUMENT : UNINITIALIZED;
    return number32(__func__, card, "temperature", celsius);
}

int nvmlDeviceGetPowerUsage(nvmlDevice_t card, unsigned *mw) { return number32(__func__, card, "power", mw); }

int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t card, unsigned *mw) {
    return number32(__func__, card, "power_limit", mw);
}

int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t card, u64 *mj) { return number(__func__, card, "energy", mj); }

int nvmlDeviceGetMigMode(nvmlDevice_t card, unsigned *now, unsigned *pending) {
    int code = number32(__func__, card, "mig", now);
    if (!code) *pending = *now;
    return code;
}

int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t card, int *major, int *minor) {
    char value[LINE];
    int code = ready(__func__, card);
    if (code) return code;
    return card_state(card, "capability", value) && sscanf(value, "%d %d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t card, unsigned *count) {
    unsigned split = 0;
    int code = number32(__func__, card, "mig", &split);
    *count = split ? INSTANCES : 0;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t card, unsigned index, nvmlDevice_t *instance) {
    char value[LINE];
    int code = ready(__func__, card);
    if (code) return code;
    if (index >= INSTANCES) return INVALID_ARGUMENT;
    *instance = handle(card_of(card), index + 1);
    return card_state(*instance, "uuid", value) ? failure(__func__, *instance) : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *card) {
    if (!is_instance(instance)) return INVALID_ARGUMENT;
    *card = handle(card_of(instance), 0);
    return ready(__func__, instance);
}

/* In this stub, instance N is GPU instance N + 7 with one compute instance. */
int nvmlDeviceGetGpuInstanceId(nvmlDevice_t instance, unsigned *id) {
    if (!is_instance(instance)) return NOT_SUPPORTED;
    *id = instance_of(instance) + 7;
    return ready(__func__, instance);
}

int nvmlDeviceGetComputeInstanceId(nvmlDevice_t instance, unsigned *id) {
    if (!is_instance(instance)) return NOT_SUPPORTED;
    *id = 0;
    return ready(__func__, instance);
}

int nvmlDeviceGetAttributes_v2(nvmlDevice_t instance, nvmlDeviceAttributes_t *parts) {
    memset(parts, 0, sizeof *parts);
    int code = number32(__func__, instance, "slices", &parts->gpuInstanceSliceCount);
    if (!code) code = number(__func__, instance, "memory_total", &parts->memorySizeMB);
    parts->computeInstanceSliceCount = parts->gpuInstanceSliceCount;
    parts->memorySizeMB >>= 20;
    return code;
}
